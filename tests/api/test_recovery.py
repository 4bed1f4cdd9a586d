"""What the operator has to rebuild when it is lost."""

from __future__ import annotations

import pytest

from tests.support.custom import GROUP_VERSION
from tests.support.fake_pods import MERGE, Slot, eventually, ref
from tests.support.rest import Rest

pytestmark = pytest.mark.api

V10, V11 = ref("1.0", "a"), ref("1.1", "b")


async def test_a_lost_status_is_rebuilt_from_assignment_and_engines(slot: Slot, rest: Rest) -> None:
    """As after a restore from a backup, which has no status."""
    for _ in range(2):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)
    slot.bump(V11)
    await slot.ready_at(V11)
    path = f"/apis/{GROUP_VERSION}/namespaces/{slot.namespace}/modelversions/{slot.name}/status"
    before = slot.object()["status"]
    gone = dict.fromkeys(before) | {"observedGeneration": -1, "conditions": []}
    rest.call("PATCH", path, {"status": gone}, content=MERGE).accepted()
    await eventually(lambda: slot.condition("Ready") == ("True", "Succeeded"), what=slot.story)
    after = slot.object()["status"]
    for part in ("target", "stable", "versions", "podCounts"):
        assert after[part] == before[part], part
    assert [len(pod.sidecar.swaps) for pod in slot.pods] == [1, 1], "nothing was swapped for it"
