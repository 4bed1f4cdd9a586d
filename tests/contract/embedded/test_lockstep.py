"""A pause that ends before a loop of the team has come to stand for it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus

from modelswap_engine.backends.embedded.lockstep import Lockstep

pytestmark = pytest.mark.model

SECONDS = 10.0


class Loop:
    """One loop whose peer asks for a pause at the first exchange, and for none after it."""

    def __init__(self) -> None:
        self.status = BackgroundThreadStatus()
        peers = SimpleNamespace(is_tp_driver=False)
        manager: Any = SimpleNamespace(distributed_helper=peers, background_thread_status=self.status)
        self.lockstep = Lockstep(manager, digest=lambda: "v1")
        self.asked = [1, 0]
        self.between: list[Any] = []
        self.lockstep._exchange = self._exchange  # type: ignore[method-assign]

    def _exchange(self, payload_size: int, stop_status: int, pause_requested: int) -> tuple[int, int, int]:
        pause = self.asked.pop(0)
        for act in self.between:
            act()
        self.between.clear()
        return payload_size, stop_status, pause

    def step(self) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.lockstep._meet(0, 0), daemon=True)
        thread.start()
        return thread


def stood_still(loop: Loop) -> None:
    with loop.status._condition:
        assert loop.status._condition.wait_for(lambda: loop.status._paused, SECONDS)


def test_it_does_not_wait_for_an_end_that_was() -> None:
    loop = Loop()
    loop.between.append(loop.lockstep.let_go)
    thread = loop.step()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_it_stands_still_until_the_end() -> None:
    loop = Loop()
    loop.lockstep.let_go()  # of an earlier pause
    thread = loop.step()
    stood_still(loop)
    loop.lockstep.let_go()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_somebody_here_who_holds_the_pause_ends_it() -> None:
    loop = Loop()
    holds = threading.Thread(target=lambda: loop.status.acquire_pause(threading.Event()), daemon=True)

    def ask() -> None:
        holds.start()
        while not loop.status.is_pause_requested():
            pass
        loop.lockstep.let_go()

    loop.between.append(ask)
    thread = loop.step()
    stood_still(loop)
    holds.join(SECONDS)
    loop.status.release_pause()
    thread.join(SECONDS)
    assert not thread.is_alive()
