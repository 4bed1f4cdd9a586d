"""Ends a program with all its processes when whoever started it ends, however that ends: also killed, also in a thread.

A signal on the death of the parent reaches one process, and engines have several; and it comes when the *thread* ends
that started it. So a process of its own, in the standard library alone, waits until a pipe closes, which the kernel
sees to. Refuses to know what the program is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


class Leash:
    """Holds a program that leads a process group of its own, until it is let go or this process ends."""

    def __init__(self, pid: int) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends the test run as a group does not end this first
        )

    def let_go(self) -> None:
        """Watch no longer: the program has ended, and its number may become another's."""
        self._watcher.kill()
        self._watcher.communicate()


def tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def end(pid: int, *, known: Iterable[int] = ()) -> None:
    """Kill a program: its group, and whatever of it has left that, also of what was ``known`` before it ended."""
    everybody = [*tree(pid), *known]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for one in everybody:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(int(sys.argv[1]))
