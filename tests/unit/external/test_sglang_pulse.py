"""A token that is asked for to see whether SGLang lives, and loads of weights that must not meet it."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.pulse import Pulse
from modelswap_engine.protocol.errors import Busy

LONG = 60.0


class Engine:
    """Keeps its cache while it makes a token, and answers for the token long after it has made it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun, self.answered = asyncio.Event(), asyncio.Event()
        self.making = 0

    async def generates(self, *, seconds: float) -> bool:
        self.asked.append("token")
        self.begun.set()
        await self.answered.wait()
        return True

    async def flush(self, *, seconds: float) -> bool:
        self.asked.append("flush")
        self.making -= 1
        return self.making < 0

    async def update_from_disk(self, path: str, version: str, *, seconds: float) -> SimpleNamespace:
        self.asked.append("update")
        return SimpleNamespace(success=True)


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
def pulse(engine: Engine) -> Pulse:
    return Pulse(cast(SglangClient, engine), every=0.0, silent=LONG)


async def under_way(engine: Engine, pulse: Pulse) -> None:
    assert pulse.beats(paused=False)
    await engine.begun.wait()


async def test_a_load_waits_for_a_token_on_its_way_and_not_for_the_answer(engine: Engine, pulse: Pulse) -> None:
    control = SglangControl(cast(SglangClient, engine), pulse=pulse)
    engine.making = 2
    await under_way(engine, pulse)
    await control.load_full("/folder", "sha256:1", seconds=LONG)
    assert engine.asked == ["token", "flush", "flush", "flush", "update"]
    await pulse.end()


async def test_nothing_is_loaded_into_an_engine_that_does_not_come_to_rest(engine: Engine, pulse: Pulse) -> None:
    control = SglangControl(cast(SglangClient, engine), pulse=pulse)
    engine.making = 2
    with pytest.raises(Busy):
        await control.load_full("/folder", "sha256:1", seconds=0.0)
    assert "update" not in engine.asked


async def test_no_token_is_asked_for_while_it_is_held(engine: Engine, pulse: Pulse) -> None:
    with pulse.held(), pulse.held():
        assert pulse.beats(paused=False)
        await asyncio.sleep(0)
        assert engine.asked == []
    await under_way(engine, pulse)
    await pulse.end()


async def test_silence_counts_from_the_last_token(engine: Engine) -> None:
    now = [0.0]
    pulse = Pulse(cast(SglangClient, engine), every=1.0, silent=10.0, clock=lambda: now[0])
    await under_way(engine, pulse)
    now[0] = 9.9
    assert pulse.beats(paused=False)
    now[0] = 10.0
    assert not pulse.beats(paused=False)
    await pulse.end()
