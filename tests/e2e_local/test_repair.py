"""A bit of a live tensor flips under load: it is found, nobody is answered from it, and it is loaded again."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e_local.conftest import Serve
from tests.e2e_local.test_swap import file_hashes, live_hashes, swap
from tests.support.clients import load_on

pytestmark = pytest.mark.model

_TENSOR = "model.layers.1.mlp.up_proj.weight"  # not one that the two versions differ in


async def test_a_damaged_live_tensor_is_loaded_again_under_load(serve: Serve, pair: Path) -> None:
    served = serve(fault=f"release:flip={_TENSOR}#1")
    worker = served.worker_pid()
    async with load_on(served.data_url, streams=3, max_tokens=24) as load:
        await load.served_more(3)
        await swap(served, pair / "v2", "1.1")
        while served.state().repairs == 0:
            await asyncio.sleep(0.05)
        await load.served_more(6)
    state = served.state()
    assert state.repair is not None
    assert state.repair.plan is not None
    assert state.repair.plan.changed_names == [_TENSOR]
    assert state.repair.bytes_fetched < state.memory.model_bytes / 10
    assert (state.ready, state.drifted, state.restarts, served.worker_pid()) == (True, [], 0, worker)
    assert state.previous is None
    assert live_hashes(served) == file_hashes(pair / "v2")
    # Who was being answered when it was found got an error that says to ask again; nobody else noticed.
    failures = [answer.failure for answer in load.answers if answer.failure]
    assert all("send it again" in text or "not those of the version" in text for text in failures), failures
    assert len(failures) <= 3
    assert load.summary().mixed == 0
