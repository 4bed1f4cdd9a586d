"""What the demo shows of a rollout, with the real kubectl, API server and operator; only the pods are scripted."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from demo.slot import DemoSlot
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.states import SwapState
from tests.support.apiserver import ApiServer
from tests.support.cluster.provider import Clients, Programs
from tests.support.fake_pods import Slot, digest, ref
from tests.support.fake_sidecar import Content
from tests.support.operated import OperatorProcess
from tests.support.reaching import kubectl_program

pytestmark = pytest.mark.api

V10, V11 = ref("1.0", "a"), ref("1.1", "b")
TENSOR = (
    "tensor model.layers.29.mlp.down_proj.weight: bytes hash to a9b4312c276d29bd, the manifest says c1faa858ea1244ec"
)


@pytest.fixture
async def demo(slot: Slot, definitions: ApiServer, operator: OperatorProcess, tmp_path: Path) -> DemoSlot:
    """The demo's eyes on a slot with two pods that serve 1.0."""
    for _ in range(2):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)
    clients = Clients(kubeconfig=definitions.kubeconfig, programs=Programs(kubectl=kubectl_program(), helm=""))
    return DemoSlot(clients, build=tmp_path, name=slot.name, namespace=slot.namespace)  # type: ignore[arg-type]


async def settle(demo: DemoSlot, slot: Slot, *, to: str) -> None:
    generation = slot.object()["metadata"]["generation"]
    await asyncio.to_thread(demo.settle, generation, to=to)


async def test_a_rollout_is_watched_line_by_line_to_its_end(
    demo: DemoSlot, slot: Slot, capsys: pytest.CaptureFixture[str]
) -> None:
    first = slot.pods[0].sidecar
    first.hold_at = SwapState.STAGED
    slot.bump(V11)
    settled, shown = asyncio.create_task(settle(demo, slot, to="Ready")), ""
    while "0/2 pods serve 1.1" not in shown:
        shown += capsys.readouterr().out
        await asyncio.sleep(0.05)
    first.go.set()
    await settled
    shown += capsys.readouterr().out
    assert f"kubectl get modelversion {slot.name} --watch" in shown
    rows = [line.split(" s  ", 1)[1].split() for line in shown.splitlines() if " s  " in line]
    assert rows[0] == ["NAME", "VERSION", "SERVING", "READY", "STATUS"]
    assert rows[-1] == [slot.name, "1.1", "1.1", "True", "2/2", "pods", "serve", "1.1"]
    assert all(one != other for one, other in itertools.pairwise(rows))


async def test_a_refusal_is_shown_with_cause_and_what_is_served_and_no_more(
    demo: DemoSlot, slot: Slot, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ErrorBody(code="ManifestMismatch", message=TENSOR, advice="copy it again or rebuild the manifest")
    slot.contents["file:///models/1.1"] = Content(digest("b"), late=error)
    slot.bump(V11)
    await settle(demo, slot, to="Stalled")
    assert await asyncio.to_thread(demo.refusal, V11.digest)
    capsys.readouterr()
    await asyncio.to_thread(demo.show_refusal, "1.1")
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    assert TENSOR in words
    assert "copy it again or rebuild the manifest" in words
    assert "Reason: ManifestMismatch Status: True Type: Stalled" in words
    assert "Reason: PodsServe Status: True Type: Serving" in words
    assert "Warning ManifestMismatch" in words
    for left_out in ("Type: Ready", "Last Transition Time", "Normal", "Served Model Name"):
        assert left_out not in words
    assert max(map(len, shown.splitlines())) < 120
