"""What the operator's process tells of its passes when the environment asks for traces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.api.conftest import CONTENTS
from tests.support.apiserver import ApiServer
from tests.support.fake_pods import Slot, eventually, ref
from tests.support.operated import OperatorProcess, granted
from tests.support.rest import Rest

pytestmark = pytest.mark.api

NAMESPACE = "operated-traced"
V10, V11 = ref("1.0", "a"), ref("1.1", "b")


@pytest.fixture(scope="module")
def operator(definitions: ApiServer, rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    home = tmp_path_factory.mktemp("traced")
    process = OperatorProcess(definitions, home, account=granted(definitions, rest, home, namespace=NAMESPACE))
    process.variables = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    process.start()
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture
async def slot(operator: OperatorProcess, rest: Rest) -> AsyncIterator[Slot]:
    found = Slot(rest, namespace=NAMESPACE, name="chat", contents=dict(CONTENTS))
    yield found
    await found.remove()


def spans(log: str) -> list[dict[str, Any]]:
    """Return the spans among the lines of a log."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (at := log.find('{\n    "name"', at)) >= 0:
        span, at = decoder.raw_decode(log, at)
        found.append(span)
    return found


async def test_passes_that_act_are_traced_with_their_calls_and_others_are_not(
    slot: Slot, operator: OperatorProcess
) -> None:
    for _ in range(2):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)
    slot.bump(V11)
    await slot.ready_at(V11)
    asked = len(slot.pods[0].sidecar.calls)
    await eventually(lambda: len(slot.pods[0].sidecar.calls) > asked + 1, what=slot.story)  # passes with nothing to do
    operator.stop()  # what was not exported yet is exported now
    found = spans(operator.log())
    by_id = {span["context"]["span_id"]: span for span in found}
    swaps = [span for span in found if span["name"] == "POST /swaps"]
    operations = {order.operation_id: pod.name for pod in slot.pods for order in pod.sidecar.swaps}
    assert {s["attributes"]["modelswap.operation.id"]: s["attributes"]["k8s.pod.name"] for s in swaps} == operations
    for span in swaps:
        caller = by_id[span["parent_id"]]
        assert (caller["name"], caller["parent_id"]) == ("reconcile", None)
        assert caller["attributes"]["modelswap.action"] == "StartSwaps"
        assert caller["attributes"]["modelswap.slot"] == "chat"
    assert "GET /state" not in {span["name"] for span in found}
    assert "Wait" not in {span["attributes"].get("modelswap.action") for span in found}
    logged = [json.loads(line) for line in operator.log().splitlines() if '"assignment published"' in line]
    assert {line["trace_id"] for line in logged} <= {s["context"]["trace_id"].removeprefix("0x") for s in found}
    assert logged
