"""The real vLLM with its model split over two processes: one transaction over both, or none.

It computes in another precision than the checkpoint has, too, so that nothing live is the same as on disk.
"""

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.protocol.errors import WorkerLost
from tests.support import engines
from tests.support.engine_ranks import SECONDS, Client, Ranks, codes, good
from tests.support.models import LOWER, UPPER, Pair
from tests.support.orders import digest_of

pytestmark = [pytest.mark.engine, pytest.mark.full]  # in test_rank_faults two ranks change behind a sidecar


@pytest.fixture(scope="module")
def two(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[engines.EngineServer]:
    folder: Path = tmp_path_factory.mktemp("vllm-two")
    options = ("--tensor-parallel-size", "2", "--dtype", "bfloat16")
    with engines.running(engines.vllm(pair.old, folder, *options)) as server:
        yield server


@pytest.fixture
async def control(two: engines.EngineServer, session: aiohttp.ClientSession) -> VllmControl:
    made = VllmControl(two.url, session)
    assert (await made.facts(seconds=SECONDS)).ranks == 2
    return made


async def test_both_ranks_go_there_and_back(
    two: engines.EngineServer, control: VllmControl, session: aiohttp.ClientSession, pair: Pair
) -> None:
    client, ranks = Client(session, two.url), Ranks(control)
    assert codes(await ranks.adopt(pair.new)) == {"ManifestMismatch"}
    adopted = await ranks.adopt(pair.old)
    assert good(adopted).reply.digest == digest_of(pair.old)
    assert len({answer.reply.boot_id for answer in adopted}) == 2
    before = await client.texts()
    assert set("".join(before)) <= set(LOWER)
    good(await ranks.stage(pair.old, pair.new, "op"))
    for answers in await ranks.exchange("op"):
        assert [answer.reply.digest for answer in answers] == [digest_of(pair.new)] * 2
        good(answers)
    assert await control.flush(seconds=SECONDS)
    assert set("".join(await client.texts())) <= set(UPPER)
    good(await ranks.call(wire.RollbackCall(operation_id="op")))
    good(await ranks.verify("op"))
    assert await control.flush(seconds=SECONDS)
    assert await client.texts() == before


async def test_after_a_failed_call_of_its_own_no_rank_is_asked_again(control: VllmControl) -> None:
    """The last one here: the answers of this server belong to other calls from now on."""
    with pytest.raises(WorkerLost):
        await control.load_full("/nowhere", "sha256:none", seconds=SECONDS)
    with pytest.raises(WorkerLost, match="earlier call"):
        await control.call_all("{}", seconds=SECONDS)
