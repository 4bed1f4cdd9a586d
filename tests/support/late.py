"""Lateness, for a whole run of tests: ``pytest -p tests.support.late`` finds those that take work to be over at once.

On an idle machine what goes on in the background is over before a test looks again; on a busy one, once in a thousand
times, it is not. Here the loop, threads and acts of engines in memory are held up by chance, for each test as its seed
says (``LATE=7``), so that such a test fails where somebody looks for it and not in a run for something else.
"""

import asyncio
import os
import selectors
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any, Final

import pytest

LOOP_SECONDS: Final = 0.003
THREAD_SECONDS: Final = 0.02
ACT_SECONDS: Final = 0.03
LOOP_SHARE: Final = 0.05
THREAD_SHARE: Final = 0.3

_pause = time.sleep  # as it is before tests watch for those who block a loop
_late: Random | None = None


def pytest_configure() -> None:
    """Begin to hold things up."""
    global _late
    _late = Random()
    _hold_up_loops(_late)
    _hold_up_threads(_late)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the same test meet the same delays, whoever runs before it."""
    if _late is not None:
        _late.seed(f"{os.environ.get('LATE', '1')} {item.nodeid}")


async def act() -> None:
    """Take the time that an act of an engine takes: a turn of the loop, or many."""
    await asyncio.sleep(0)
    if _late is not None:
        until = time.monotonic() + _late.uniform(0, ACT_SECONDS)
        while time.monotonic() < until:
            await asyncio.sleep(0)  # and not a timer: a clock that stands still waits for all that can happen


def _hold_up_loops(chance: Random) -> None:
    real = selectors.DefaultSelector.select

    def select(self: Any, timeout: float | None = None) -> Any:
        if chance.random() < LOOP_SHARE:
            _pause(chance.uniform(0, LOOP_SECONDS))
        return real(self, timeout)

    selectors.DefaultSelector.select = select  # type: ignore[method-assign]


def _hold_up_threads(chance: Random) -> None:
    real = ThreadPoolExecutor.submit

    def submit(self: ThreadPoolExecutor, work: Any, /, *args: Any, **named: Any) -> Future[Any]:
        if chance.random() < THREAD_SHARE:
            return real(self, partial(_after, chance.uniform(0, THREAD_SECONDS), work), *args, **named)
        return real(self, work, *args, **named)

    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _after(seconds: float, work: Any, *args: Any, **named: Any) -> Any:
    _pause(seconds)
    return work(*args, **named)
