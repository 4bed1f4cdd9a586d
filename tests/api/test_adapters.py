"""LoRAAdapters with the operator's process and a real API server; sidecars are `fake_sidecar`s behind real pods."""

from __future__ import annotations

import re

import pytest

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.policy import Verification
from tests.support.fake_pods import Slot, digest, eventually, ref
from tests.support.fake_sidecar import Content
from tests.support.operated import OperatorProcess
from tests.support.rest import Rest

pytestmark = pytest.mark.api

V10, V11 = ref("1.0", "a"), ref("1.1", "b")
READY = ("True", "Succeeded")


def source(content: str, *, base: str = "") -> dict[str, str]:
    found = {"uri": f"file:///adapters/{content}"}
    return found | ({"baseDigest": base} if base else {})


async def prepared(slot: Slot, pods: int = 2) -> None:
    """A slot whose pods serve 1.0, and what is at the sources of adapters."""
    slot.adapter_contents |= {f"file:///adapters/{number}": digest(str(number)) for number in range(10)}
    for _ in range(pods):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)


async def says(slot: Slot, name: str, what: tuple[str, str]) -> None:
    await eventually(lambda: slot.adapters_say().get(name) == what, what=lambda: str(slot.adapter(name).get("status")))


async def test_an_adapter_is_loaded_changed_and_taken_away(slot: Slot, rest: Rest) -> None:
    await prepared(slot)
    slot.create_adapter("support", source("1"))
    await says(slot, "support", READY)
    assert slot.loaded() == [{"support": "1"}] * 2
    thing = slot.adapter("support")
    status = thing["status"]
    assert (status["loadedPods"], status["wantedPods"], status["observedGeneration"]) == (2, 2, 1)
    assert status["target"] == {"uri": "file:///adapters/1", "digest": digest("1")}
    boots = sorted(pod.sidecar.boot_id for pod in slot.pods)
    assert sorted(pod["bootID"] for pod in status["pods"]) == boots
    assert not thing["metadata"].get("finalizers")
    assert not thing["metadata"].get("annotations")
    path = f"/apis/events.k8s.io/v1/namespaces/{slot.namespace}/events"
    regarding = [(e["regarding"]["name"], e["reason"]) for e in rest.call("GET", path).accepted()["items"]]
    assert (thing["metadata"]["name"], "Succeeded") in regarding

    slot.adapter_contents["file:///adapters/bad"] = ErrorBody(code="InvalidCheckpoint", message="cut short")
    slot.patch_adapter("support", sources=[source("bad")])
    await says(slot, "support", ("False", "InvalidCheckpoint"))
    assert slot.loaded() == [{"support": "1"}] * 2
    slot.adapter_contents["file:///adapters/bad"] = digest("2")
    slot.mark_adapter("support", annotations={"modelswap.dev/requestedAt": "mended"})
    await says(slot, "support", READY)
    assert slot.loaded() == [{"support": "bad"}] * 2
    assert slot.adapter("support")["status"]["lastHandledRequestAt"] == "mended"

    slot.delete_adapter("support")
    await eventually(lambda: slot.loaded() == [{}] * 2)
    found = slot.assignment()
    assert found is not None
    assert (found.adapters, found.adapters_revision) == ([], 4)
    assert slot.condition("Ready") == READY


async def test_credentials_and_the_slot_s_policy_reach_the_pods(slot: Slot) -> None:
    where = "s3://models/adapters/support"
    slot.adapter_contents[where] = digest("1")
    (await slot.add_pod(V10)).sidecar.protocol = 3
    slot.contents[V10.uri] = Content(V10.digest, signed_by="key release.pub")
    slot.create(V10, verification={"required": True, "keys": ["release.pub"]})
    await slot.ready_at(V10)
    slot.create_adapter("support", {"uri": where, "credentialsRef": {"name": "adapters"}})
    await says(slot, "support", READY)
    found = slot.assignment()
    assert found is not None
    loaded = found.adapters[0].source_for(V10.digest)
    assert loaded is not None
    assert (loaded.credentials, loaded.digest) == ("adapters", digest("1"))
    assert loaded.verification == Verification(required=True, keys=("release.pub",))


async def test_base_and_adapter_change_together_and_what_is_missing_blocks(slot: Slot) -> None:
    await prepared(slot)
    slot.create_adapter("support", source("1", base=V10.digest))
    await says(slot, "support", READY)
    slot.bump(V11)
    await slot.stalled("BlockedByAdapter")
    assert "LoRAAdapter" in slot.message()
    assert [len(p.sidecar.swaps) for p in slot.pods] == [0, 0]
    slot.patch_adapter("support", sources=[source("2", base=V11.digest)])
    await slot.ready_at(V11)
    await says(slot, "support", READY)
    assert slot.loaded() == [{"support": "2"}] * 2
    slot.bump(V10)
    await slot.stalled("BlockedByAdapter")
    slot.patch(adapters={"onIncompatible": "Unload"})
    await slot.ready_at(V10)
    await says(slot, "support", ("False", "NoSourceForBase"))


async def test_new_and_restarted_pods_have_what_is_assigned(slot: Slot, operator: OperatorProcess) -> None:
    await prepared(slot)
    slot.create_adapter("everywhere", source("1"))
    slot.create_adapter("once", source("2"), placement={"pods": 1})
    await says(slot, "once", READY)
    await says(slot, "everywhere", READY)
    operator.kill()
    pod = await slot.add_pod(V10)  # nobody tells it
    assert slot.loaded()[2] == {"everywhere": "1"}
    first = next(p for p, names in zip(slot.pods, slot.loaded(), strict=True) if "once" in names)
    slot.delete_pod(first)
    operator.start()
    operator.wait_ready()
    await says(slot, "once", READY)
    await eventually(lambda: sum("once" in names for names in slot.loaded()) == 1)
    pod.sidecar.restart(V10)
    assert pod.sidecar.adapters is not None
    pod.sidecar.adapters.restart(slot.assignment(), V10.digest)
    await eventually(lambda: pod.sidecar.boot_id in str(slot.adapter("everywhere")["status"]["pods"]))
    await says(slot, "everywhere", READY)


async def test_a_taken_name_and_a_missing_slot_are_said(slot: Slot) -> None:
    slot.create_adapter("support", source("1"))
    await says(slot, "support", ("False", "SlotNotFound"))
    await prepared(slot)
    await says(slot, "support", READY)
    slot.create_adapter("second", source("2"), adapterName="chat")  # the slot's own name
    await says(slot, "chat", ("False", "NameTaken"))
    assert slot.loaded() == [{"support": "1"}] * 2
    slot.delete()
    await says(slot, "support", ("False", "SlotNotFound"))
    assert slot.loaded() == [{"support": "1"}] * 2


async def test_a_service_is_made_and_what_the_api_server_refuses_of_it_is_said(slot: Slot, rest: Rest) -> None:
    """The pods here have loopback addresses, which no EndpointSlice takes; `test_adapter_services` has others."""
    await prepared(slot)
    slot.create_adapter("support", source("1"), service={})
    await says(slot, "support", ("False", "ServiceRefused"))
    assert "loopback" in str(slot.adapter("support")["status"]["conditions"])
    assert slot.loaded() == [{"support": "1"}] * 2
    path = f"/api/v1/namespaces/{slot.namespace}/services/{slot.name}-support"
    assert rest.call("GET", path).accepted()["metadata"]["ownerReferences"][0]["kind"] == "LoRAAdapter"
    slot.patch_adapter("support", service=None)
    await says(slot, "support", READY)
    assert rest.call("GET", path).status == 404


async def test_two_hundred_adapters_on_three_pods_settle_and_then_nothing_is_written(
    slot: Slot, operator: OperatorProcess
) -> None:
    await prepared(slot, 3)
    for number in range(200):
        slot.create_adapter(f"a{number:03d}", source(str(number % 10)))
    await eventually(lambda: list(slot.adapters_say().values()) == [READY] * 200)
    assert [len(names) for names in slot.loaded()] == [200] * 3
    calls = [call for pod in slot.pods for call in pod.sidecar.calls]
    assert len([call for call in calls if call == "PUT /adapters"]) < 200

    def writes() -> list[str]:
        return re.findall(r"modelswap_status_writes_total.*", operator.get("/metrics")[1])

    def looks() -> int:
        return sum(call == "GET /state" for call in slot.pods[0].sidecar.calls)

    before, seen = writes(), looks()
    await eventually(lambda: looks() > seen + 2)
    assert writes() == before
