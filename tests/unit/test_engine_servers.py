"""What the tests' own engine servers leave behind: nothing, whoever ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cache import REPOSITORY
from tests.support.engines import EngineServer
from tests.support.launcher import alive, until

# As vLLM: a process below the first one that does not end when asked; and if told so, one that has left its group.
ENGINE = """
import os, subprocess, sys, time
sleeps = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
deaf = [sys.executable, "-S", "-c", sleeps]
children = [subprocess.Popen(deaf, start_new_session=stray == "stray").pid for stray in ["child", *sys.argv[2:]]]
with open(sys.argv[1] + ".draft", "w") as file:
    file.write(" ".join(map(str, [os.getpid(), *children])))
os.rename(sys.argv[1] + ".draft", sys.argv[1])
time.sleep(600)
"""
TEST = """
import sys, threading, time
from pathlib import Path
from tests.support.engines import EngineServer
def start():
    EngineServer("fake", [sys.executable, "-S", "-c", sys.argv[1], sys.argv[2], "stray"], port=1, log=Path(sys.argv[3]))
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(600)
"""


def told(file: Path) -> list[int]:
    until(file.exists, "the engine runs")
    return [int(word) for word in file.read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_test_run_that_dies_takes_all_of_an_engine_along(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", TEST, ENGINE, str(tmp_path / "told"), str(tmp_path / "log")]
    run = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    try:
        everybody = told(tmp_path / "told")
        assert all(alive(pid) for pid in everybody)  # although the thread that started it has ended
        run.send_signal(number)
        run.wait()
    finally:
        run.kill()
    until(lambda: not [pid for pid in everybody if alive(pid)], "all of it has ended")


def test_a_server_whose_first_process_was_killed_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", ENGINE, str(tmp_path / "told")]
    server = EngineServer("fake", command, port=1, log=tmp_path / "log")
    first, other = told(tmp_path / "told")
    os.kill(first, signal.SIGKILL)
    server.stop()
    until(lambda: not alive(other), "it has ended")
