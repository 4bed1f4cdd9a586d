"""Heaps of a process: as many as there are threads by default, a few where we say so."""

import os
import platform
import subprocess
import sys

PROGRAM = """
import ctypes, sys, threading
from modelswap_engine.cli.allocator import one_heap
if sys.argv[1] == "few":
    assert one_heap() or sys.argv[2] != "glibc"
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
heaps, barrier = set(), threading.Barrier(6)
def take():
    barrier.wait()
    heaps.add(libc.malloc(ctypes.c_size_t(1000)) >> 26)  # a heap of a thread is 64 MiB, and aligned to that
    barrier.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(heaps))
"""


def heaps(how: str, **environment: str) -> int:
    variables = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | environment
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, platform.libc_ver()[0]],
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_all_threads_have_one_heap() -> None:
    assert heaps("few") == 1


def test_what_the_environment_says_is_left() -> None:
    assert heaps("as it is", MALLOC_ARENA_MAX="1") == 1
