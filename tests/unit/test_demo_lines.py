"""A program that goes on running is followed line by line, and is gone afterwards."""

from __future__ import annotations

import os
import sys

import pytest

from demo.lines import Lines

STAYS = "import time\nprint('one', flush=True)\nprint('two', flush=True)\ntime.sleep(600)"


def following(code: str) -> Lines:
    return Lines([sys.executable, "-c", code], environment=os.environ)


def test_lines_come_while_the_program_goes_on() -> None:
    with following(STAYS) as lines:
        assert [lines.next(seconds=60), lines.next(seconds=60)] == ["one", "two"]
        with pytest.raises(TimeoutError, match="no line"):
            lines.next(seconds=0.01)


def test_the_end_of_the_program_is_told_again_and_again() -> None:
    with following("print('only')") as lines:
        assert lines.next(seconds=60) == "only"
        for _ in range(2):
            with pytest.raises(EOFError, match="has ended"):
                lines.next(seconds=60)


def test_one_that_ignores_sigterm_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.lines._STOP_SECONDS", 0.1)
    deaf = "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\n" + STAYS
    with following(deaf) as lines:
        pid = int(lines.next(seconds=60))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
