"""A trainer changes the weights of a whole engine process under load, saves them, and they outlive a kill."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.engine_state import UpdateState
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.transfers import ReadRequest, ReadResult, SaveRequest, SaveResult
from modelswap_engine.protocol.updates import BeginUpdate, CommitUpdate, DiskPart
from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.clients import asking, honest, load_on, makers
from tests.support.custom_loaders import RENAMED
from tests.support.free_ports import free_port
from tests.support.orders import ranges
from tests.support.serve import Served
from tests.support.trainer import trainer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Iterator[tuple[Served, Path]]:
    folder = tmp_path_factory.mktemp("trained")
    out = folder / "out"
    options = ["--version", "1.0", "--export-root", str(out), "--weight-loader", RENAMED]
    served = Served(folder / "pod", pair / "v1", options=options, roots=[pair, out])
    yield served.start().wait_ready(), out
    served.stop()
    print(served.tail(lines=100))


@pytest.fixture
def trained(started: tuple[Served, Path], pair: Path) -> Served:
    """The process, serving version 1.0 whatever the test before left behind."""
    served, _ = started
    live = served.state().live
    if live is None or live.version != "1.0":
        done = served.command("swap", "--source", str(pair / "v1"), "--version", "1.0")
        assert done.code == 0, done.out + done.err
    return served


def send(served: Served, tensors: bytes) -> UpdateState:
    request = urllib.request.Request(
        f"{served.control_url}/modelswap/v1/updates/step-1/tensors?owner=test&loader={RENAMED}",
        data=tensors,
        headers={"Authorization": f"Bearer {served.token_file.read_text().strip()}"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return msgspec.json.decode(answer.read(), type=UpdateState)


def update(served: Served, pair: Path) -> SwapStatus:
    """Bring ``v2`` over ``v1``: the head as a body, under other names and in double precision, the rest from disk."""
    from safetensors.torch import load_file, save

    control = served.control
    head = load_file(pair / "v2" / "model.safetensors")["lm_head.weight"]
    control.post("/updates", BeginUpdate(update_id="step-1", owner="test"), UpdateState)
    part = DiskPart(uri=(pair / "v2").as_uri(), owner="test", names=("model.layers.*", "model.norm.*"))
    control.post("/updates/step-1/disk", part, UpdateState)
    state = send(served, save({"trainer.lm_head.weight": head.double()}))
    assert "tensor" in state.sources
    return control.post("/updates/step-1/commit", CommitUpdate(owner="test", version="1.1"), SwapStatus)


def label(served: Served) -> str:
    live = served.state().live
    return live.version if live is not None else ""


def compat(served: Served, route: str, **body: object) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{served.control_url}/compat/sglang/{route}",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {served.token_file.read_text().strip()}"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


async def called(served: Served, route: str, **body: object) -> None:
    status, answer = await asyncio.to_thread(lambda: compat(served, route, **body))
    assert status == 200, answer


async def test_a_trainer_that_knows_sglang(trained: Served, pair: Path) -> None:
    """Pause, buckets through a process group, continue; a request in flight goes on with the new weights."""
    old, new = file_hashes(pair / "v1"), file_hashes(pair / "v2")
    names, port = sorted(name for name in new if old[name] != new[name]), free_port()
    shapes = {item.name: list(item.shape) for item in ranges(pair / "v2")}
    group = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2}
    with trainer(port, pair / "v2", names, "single"):
        await called(trained, "init_weights_update_group", group_name="weights", backend="gloo", **group)
        with trained.slowly():
            begun = asyncio.Event()
            answering = asking(trained.data_url, tokens=600, begun=begun)
            await begun.wait()
            await called(trained, "pause_generation", mode="retract")
        for bucket in (names[:2], names[2:]):
            await called(
                trained,
                "update_weights_from_distributed",
                names=bucket,
                dtypes=["float32"] * len(bucket),
                shapes=[shapes[name] for name in bucket],
                group_name="weights",
                weight_version="1.1",
            )
        assert label(trained) == "1.0"
        await called(trained, "continue_generation")
        assert label(trained) == "1.1"
        await called(trained, "destroy_weights_update_group", group_name="weights")
    answer = await answering
    assert answer.failure == ""
    assert [span.version for span in answer.spans] == ["1.0", "1.1"]
    assert honest(answer)
    assert live_hashes(trained) == new


async def test_a_pause_that_aborts_ends_requests_at_once(trained: Served, pair: Path) -> None:
    with trained.slowly():
        begun = asyncio.Event()
        answering = asking(trained.data_url, tokens=600, begun=begun)
        await begun.wait()
        await called(trained, "pause_generation", mode="abort")
    assert (await answering).failure != ""
    assert trained.state().gate.in_flight == 0
    await called(trained, "continue_generation")
    assert live_hashes(trained) == file_hashes(pair / "v1")


async def test_a_trainer_under_load(trained: Served, started: tuple[Served, Path], pair: Path) -> None:
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
    target = started[1] / "step-1"
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
