"""A trainer changes the weights of a whole engine process under load, saves them, and they outlive a kill."""

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.engine_state import UpdateState
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.transfers import ReadRequest, ReadResult, SaveRequest, SaveResult
from modelswap_engine.protocol.updates import BeginUpdate, CommitUpdate, DiskPart
from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.clients import honest, load_on, makers
from tests.support.serve import Served

pytestmark = pytest.mark.model


@pytest.fixture
def trained(tmp_path: Path, pair: Path) -> Iterator[Served]:
    out = tmp_path / "out"
    options = ["--version", "1.0", "--export-root", str(out)]
    served = Served(tmp_path / "pod", pair / "v1", options=options, roots=[pair, out])
    yield served.start().wait_ready()
    served.stop()
    print(served.tail(lines=100))


def send(served: Served, tensors: bytes) -> UpdateState:
    request = urllib.request.Request(
        f"{served.control_url}/modelswap/v1/updates/step-1/tensors?owner=test",
        data=tensors,
        headers={"Authorization": f"Bearer {served.token_file.read_text().strip()}"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return msgspec.json.decode(answer.read(), type=UpdateState)


def update(served: Served, pair: Path) -> SwapStatus:
    """Bring ``v2`` over ``v1``: the head as a body, the rest from disk by name."""
    from safetensors.torch import load_file, save

    control = served.control
    head = load_file(pair / "v2" / "model.safetensors")["lm_head.weight"]
    control.post("/updates", BeginUpdate(update_id="step-1", owner="test"), UpdateState)
    part = DiskPart(uri=(pair / "v2").as_uri(), owner="test", names=("model.layers.*", "model.norm.*"))
    control.post("/updates/step-1/disk", part, UpdateState)
    state = send(served, save({"lm_head.weight": head}))
    assert "tensor" in state.sources
    return control.post("/updates/step-1/commit", CommitUpdate(owner="test", version="1.1"), SwapStatus)


async def test_a_trainer_under_load(trained: Served, pair: Path, tmp_path: Path) -> None:
    truth = build_manifest(pair / "v2")
    async with load_on(trained.data_url, streams=3, max_tokens=32) as load:
        await load.served_more(4)
        status = await asyncio.to_thread(update, trained, pair)
        assert status.state is SwapState.SERVING, status.error
        await load.served_more(4)
    assert load.summary().failed == 0, load.summary().lines()
    assert load.summary().mixed == 0
    assert set().union(*map(makers, load.answers)) == {"1.0", "1.1"}
    assert all(map(honest, load.answers))
    # The digest is that of the same tensors on disk, and the bytes are the file's.
    assert status.target.digest == truth.digest
    assert live_hashes(trained) == file_hashes(pair / "v2")
    row = trained.control.post("/export/read", ReadRequest(name="model.norm.weight", rows=3), ReadResult)
    assert (row.dtype, row.shape) == ("F32", [3])
    # Saved, it outlives the process.
    target = tmp_path / "out" / "step-1"
    saved = trained.control.post("/export/save", SaveRequest(uri=target.as_uri(), shard_bytes=100_000), SaveResult)
    assert (saved.digest, saved.lasting) == (truth.digest, True)
    assert len(saved.files) > 1
    assert build_manifest(target).digest == truth.digest
    trained.kill()
    trained.start().wait_ready()
    live = trained.state().live
    assert live is not None
    assert (live.version, live.digest) == ("1.1", truth.digest)
    assert live_hashes(trained) == file_hashes(pair / "v2")
