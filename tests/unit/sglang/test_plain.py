"""What the plain route to SGLang asks it for by itself, between two swaps that follow each other at once."""

import asyncio
from pathlib import Path

from modelswap_engine.backends.external.plain.memory import SumMemory
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.backends.sglang.answers import Loads, ServerInfo
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.exchange import Exchange
from modelswap_engine.backends.sglang.plain import SglangPlain

SETTINGS = ExternalSettings()


class Routes(SglangClient):
    """An SGLang that makes a token when told to, and none for a request that it was told to end.

    Attributes:
        asked: set once it was asked for a token.
        made: has it make the token.
        ended: whether all requests were ended before that.
    """

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.asked, self.made = asyncio.Event(), asyncio.Event()
        self.ended = False

    async def generates(self, *, seconds: float) -> bool:
        self.asked.set()
        await self.made.wait()
        return not self.ended

    async def abort_all(self, *, seconds: float) -> None:
        self.ended = not self.made.is_set()

    async def server_info(self, *, seconds: float) -> ServerInfo:
        return ServerInfo(version="0", tp_size=1, pp_size=1, dp_size=1)

    async def loads(self, *, seconds: float) -> Loads:
        return Loads(loads=[])


async def test_a_swap_that_ends_requests_does_not_end_the_question_of_the_swap_before(tmp_path: Path) -> None:
    """SGLang would seem to generate nothing, and be restarted for it."""
    routes, wish = Routes(), RestartWish()
    control = SglangControl(routes)
    engine = SglangPlain(
        routes,
        control,
        exchange=Exchange(control, folder=tmp_path, restart=wish, settings=SETTINGS, experimental=False),
        staging=Staging(tmp_path, experimental=False),
        memory=SumMemory(tmp_path / "sums"),
        restart=wish,
        settings=SETTINGS,
        experimental=False,
    )
    await engine.resume()
    await routes.asked.wait()
    pausing = asyncio.create_task(engine.pause(RequestPolicy.ABORT, seconds=10))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not pausing.done()
    routes.made.set()
    await pausing
    assert not routes.ended
    assert not wish.wanted
    await engine.close()
