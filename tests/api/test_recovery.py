"""What the operator has to rebuild when it is lost."""

from __future__ import annotations

import pytest

from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget
from modelswap_operator.effects import assignment, paths
from modelswap_operator.effects.kube import ApiConflict, Kube, load_configuration
from modelswap_operator.planning.snapshot import Ledger
from tests.support.apiserver import ApiServer
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


async def test_an_assignment_that_somebody_deleted_is_not_there_again_by_a_write_that_was_decided_before(
    definitions: ApiServer,
) -> None:
    made = Assignment(owner_uid="u", revision=1, stable=AssignmentTarget(version="1.0", uri=V10.uri, digest=V10.digest))
    path = paths.core("configmaps", "default", "modelswap-gone")
    async with Kube(await load_configuration(definitions.kubeconfig)) as kube:

        async def write(uid: str, version: str) -> None:
            await assignment.publish(
                kube,
                namespace="default",
                slot="gone",
                assignment=made,
                ledger=Ledger(),
                uid=uid,
                resource_version=version,
            )

        await write("", "")
        found = await kube.get(path)
        assert found is not None
        seen = found["metadata"]
        await write(seen["uid"], seen["resourceVersion"])
        await kube.delete(path, uid=seen["uid"])
        with pytest.raises(ApiConflict):
            await write(seen["uid"], seen["resourceVersion"])
        assert await kube.get(path) is None
