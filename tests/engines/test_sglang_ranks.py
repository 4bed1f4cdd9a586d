"""The real SGLang with its model split over two processes, behind `modelswap proxy`: both ranks change, or none."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.protocol.errors import WorkerLost
from modelswap_engine.protocol.states import SwapState
from tests.support.adapter_traffic import command, load, say
from tests.support.adapters import LINEAR
from tests.support.engine_ranks import PROMPTS, SECONDS
from tests.support.lora import on_both
from tests.support.models import Pair
from tests.support.proxied import ASKED, Versions, listen, swap
from tests.support.serve import Served
from tests.support.sglang import EXACT, LORA, Sglang, ids, with_our_half

pytestmark = pytest.mark.engine

TOKENS = 24

FAILS = """
def register():
    import os
    import torch.distributed
    from modelswap_engine.weights.updater import WeightUpdater

    commit = WeightUpdater.commit

    def sometimes(self, operation_id):
        if torch.distributed.get_rank() == 1 and os.path.exists(os.environ["TEST_RANK_FAILS"]):
            raise RuntimeError("told to fail")
        return commit(self, operation_id)

    WeightUpdater.commit = sometimes
"""


@pytest.fixture(scope="module")
def fails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file: while it is there, the second rank fails every commit."""
    return tmp_path_factory.mktemp("fails") / "now"


@pytest.fixture(scope="module")
def two(pair: Pair, fails: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    folder = tmp_path_factory.mktemp("sglang-two")
    variables = {
        **with_our_half(folder / "beside"),
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "TEST_RANK_FAILS": str(fails),
    }
    add_plugin(folder / "beside")
    server = Sglang(folder, options=(*EXACT, *LORA, "--tp", "2"), variables=variables)
    try:
        yield server.start(pair.old).wait_ready()
    finally:
        server.kill()


def add_plugin(beside: Path) -> None:
    """Have SGLang load another plugin beside ours, which breaks it: nothing in the product knows of it."""
    (beside / "rank_fails.py").write_text(FAILS)
    info = beside / "rank_fails-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rank-fails\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nrank-fails = rank_fails:register\n")


@pytest.fixture(scope="module")
def versions(two: Sglang, pair: Pair) -> Versions:
    made = Versions({"1.1": pair.new, "1.0": pair.old})
    asyncio.run(ask_engine(two, made))
    return made


async def ask_engine(two: Sglang, made: Versions) -> None:
    control = SglangControl(SglangClient(two.url))
    await made.ask(control, two.url)
    await control.close()


@pytest.fixture(scope="module")
def sidecar(two: Sglang, versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    command = ("proxy", "--backend", "sglang", "--upstream", two.url, "--version", "1.0")
    roots = [path.parent for path in versions.folders.values()]
    served = Served(tmp_path_factory.mktemp("sidecar"), versions.folders["1.0"], command=command, roots=roots)
    served.start()
    try:
        yield served.wait_ready()
    finally:
        served.stop()


async def heard(sidecar: Served) -> list[tuple[str, str]]:
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(listen(session, sidecar.data_url, prompt) for prompt in range(len(ASKED))))
    return [(answer.version, answer.text) for answer in answers]


async def test_both_ranks_change_or_none(sidecar: Served, versions: Versions, fails: Path) -> None:
    fails.touch()
    status = await swap(sidecar, versions, "1.1")
    assert status.state is SwapState.ROLLED_BACK
    assert status.error is not None
    assert "told to fail" in status.error.message
    assert await heard(sidecar) == [("1.0", text) for text in versions.texts["1.0"]]

    fails.unlink()
    assert (await swap(sidecar, versions, "1.1")).state is SwapState.SERVING
    assert await heard(sidecar) == [("1.1", text) for text in versions.texts["1.1"]]
    state = await asyncio.to_thread(sidecar.state)
    assert state.live is not None
    assert [(rank.rank, rank.digest) for rank in state.ranks] == [(0, state.live.digest), (1, state.live.digest)]
    assert len({rank.pid for rank in state.ranks}) == 2
    checked = await asyncio.to_thread(sidecar.command, "check")
    assert checked.code == 0, checked.out


async def test_an_adapter_is_on_both_ranks_and_outlives_its_base(
    sidecar: Served, versions: Versions, pair: Pair
) -> None:
    """Each of its matrices is cut in two, so an answer is right only where both ranks have theirs."""
    assert (await swap(sidecar, versions, "1.0")).state is SwapState.SERVING
    folder, wanted = await asyncio.to_thread(
        on_both, pair, "split", PROMPTS, tokens=TOKENS, seed=4, r=4, lora_alpha=8, target_modules=list(LINEAR)
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(pair.old)

    async def says() -> list[list[int]]:
        prompts = (tokenizer(prompt).input_ids for prompt in PROMPTS)
        return await asyncio.gather(*(ids(sidecar.data_url, prompt, adapter="a", tokens=TOKENS) for prompt in prompts))

    await load(sidecar, "a", folder)
    assert await says() == wanted["1.0"]
    assert (await swap(sidecar, versions, "1.1")).state is SwapState.SERVING
    assert await says() == wanted["1.1"] != wanted["1.0"]
    assert await heard(sidecar) == [("1.1", text) for text in versions.texts["1.1"]]
    await command(sidecar, "adapter", "unload", "a")
    assert "does not exist" in str((await say(sidecar, "a")).error)


async def test_after_a_rank_that_stopped_no_rank_is_asked_again(two: Sglang, sidecar: Served) -> None:
    """The last one here: the ranks of this server do not agree any more on what they were asked."""
    control = SglangControl(SglangClient(two.url))
    await control.facts(seconds=SECONDS)
    hello = wire.encode_call(1, wire.HelloCall())
    assert len(await control.call_all(hello, seconds=SECONDS)) == 2
    second = (await asyncio.to_thread(sidecar.state)).ranks[1].pid
    os.kill(second, signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="did not answer"):
        await control.call_all(hello, seconds=2)
    os.kill(second, signal.SIGCONT)
    with pytest.raises(WorkerLost, match="not asked again"):
        await control.call_all(hello, seconds=SECONDS)
    await control.close()
