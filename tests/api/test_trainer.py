"""A trainer points a ModelVersion at what it published, and waits: the API server and the operator are real."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes import client, config

from modelswap.publish import BumpFailed, NotServed, bump, wait_until_served
from modelswap.rollout import FIELD_MANAGER
from modelswap_engine.protocol.errors import ErrorBody
from tests.support.apiserver import ApiServer
from tests.support.fake_pods import Slot, digest, ref
from tests.support.fake_sidecar import Content

pytestmark = pytest.mark.api

V10, V11 = ref("1.0", "a"), ref("1.1", "b")


@pytest.fixture
def api(definitions: ApiServer) -> client.ApiClient:
    found = client.Configuration()
    config.load_kube_config(config_file=str(definitions.kubeconfig), client_configuration=found)
    return client.ApiClient(found)


async def prepared(slot: Slot) -> None:
    for _ in range(2):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)


def changed(slot: Slot, **values: Any) -> dict[str, Any]:
    given = {"version": "1.1", "uri": V11.uri, "digest": V11.digest, "force": True} | values
    return {"model_version": slot.name, "namespace": slot.namespace} | given


async def test_a_bump_is_served(slot: Slot, api: client.ApiClient) -> None:
    await prepared(slot)
    bumped = await asyncio.to_thread(bump, **changed(slot), api=api)
    served = await asyncio.to_thread(wait_until_served, bumped, timeout=60, api=api)
    assert (served.digest, served.pods, served.message) == (V11.digest, 2, "2/2 pods serve 1.1")
    assert served.seconds > 0
    assert [pod.sidecar.live for pod in slot.pods] == [V11, V11]
    thing = slot.object()
    assert bumped.generation == thing["metadata"]["generation"]
    owned = {field["manager"]: field for field in thing["metadata"]["managedFields"]}
    assert owned[FIELD_MANAGER]["operation"] == "Apply"
    assert owned[FIELD_MANAGER]["fieldsV1"] == {"f:spec": {"f:source": {"f:digest": {}, "f:uri": {}}, "f:version": {}}}


async def test_owners_of_the_fields_are_named_and_not_overruled(slot: Slot, api: client.ApiClient) -> None:
    await prepared(slot)
    with pytest.raises(BumpFailed, match="conflict") as caught:
        await asyncio.to_thread(bump, **changed(slot, force=False), api=api)
    assert "force=True" in caught.value.advice
    assert slot.object()["spec"]["version"] == "1.0"


async def test_what_is_refused_is_told_with_its_reason(slot: Slot, api: client.ApiClient) -> None:
    await prepared(slot)
    slot.contents[V11.uri] = Content(
        digest("b"), late=ErrorBody(code="ManifestMismatch", message="tensor lm_head.weight has other bytes")
    )
    bumped = await asyncio.to_thread(bump, **changed(slot), api=api)
    with pytest.raises(NotServed) as caught:
        await asyncio.to_thread(wait_until_served, bumped, timeout=60, api=api)
    assert caught.value.reason in {"ManifestMismatch", "RolledBack"}
    assert [pod.sidecar.live for pod in slot.pods] == [V10, V10]


async def test_the_api_s_own_words_and_what_is_not_there(slot: Slot, api: client.ApiClient) -> None:
    with pytest.raises(BumpFailed, match="not found") as caught:
        await asyncio.to_thread(bump, **changed(slot), api=api)
    assert caught.value.http_status == 404
    await prepared(slot)
    with pytest.raises(BumpFailed, match=r'still "1\.0"') as caught:
        await asyncio.to_thread(bump, **changed(slot, version="1.0"), api=api)
    assert caught.value.http_status == 422


async def test_somebody_else_s_change_and_the_deadline(slot: Slot, api: client.ApiClient) -> None:
    await prepared(slot)
    slot.contents["file:///models/nowhere"] = Content(digest("b"))
    bumped = await asyncio.to_thread(bump, **changed(slot), api=api)
    slot.bump(ref("1.2", "c"))
    with pytest.raises(NotServed) as caught:
        await asyncio.to_thread(wait_until_served, bumped, timeout=60, api=api)
    assert caught.value.reason == "Superseded"
    with pytest.raises(NotServed, match="not served after 0 s") as caught:
        await asyncio.to_thread(wait_until_served, bumped, timeout=0, api=api)
    assert caught.value.reason == "DeadlineExceeded"
