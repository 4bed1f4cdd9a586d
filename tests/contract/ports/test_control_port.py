"""The control port over real sockets: who gets in, what the routes answer, how a swap looks from outside."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientSession

from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import Fence, SwapRequest, VersionRef
from modelswap_engine.protocol.version import CONTROL_PREFIX
from tests.support.ports import POD, TOKEN, Ports

ROUTES = [
    ("GET", "/adapters"),
    ("POST", "/adapters"),
    ("GET", "/adapters/a"),
    ("DELETE", "/adapters/a"),
    ("GET", "/state"),
    ("POST", "/plan"),
    ("POST", "/swaps"),
    ("GET", "/swaps/op"),
    ("GET", "/swaps/op/events"),
    ("POST", "/swaps/op/cancel"),
    ("POST", "/swaps/op/hold"),
    ("POST", "/swaps/op/proceed"),
    ("POST", "/rollback"),
    ("POST", "/check"),
    ("POST", "/release"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/updates"),
    ("GET", "/updates/u"),
    ("POST", "/updates/u/disk"),
    ("POST", "/updates/u/tensors"),
    ("POST", "/updates/u/shared"),
    ("POST", "/updates/u/broadcast"),
    ("POST", "/updates/u/commit"),
    ("POST", "/updates/u/abort"),
    ("POST", "/groups"),
    ("POST", "/groups/g/leave"),
    ("POST", "/groups/g/send"),
    ("POST", "/export/read"),
    ("POST", "/export/save"),
    ("GET", "/nothing"),
]


async def call(session: ClientSession, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with session.request(method, CONTROL_PREFIX + path, json=body, headers=headers) as response:
        return response.status, await response.json()


def order(ports: Ports, target: VersionRef, operation: str = "op-1", **fence: Any) -> dict[str, Any]:
    revision = ports.coordinator.state().revision + 1
    facts = {"podUid": POD, "ownerUid": "owner-1", "epoch": 1, "revision": revision, **fence}
    version = {"version": target.version, "uri": target.uri, "digest": target.digest}
    return {"operationId": operation, "fence": facts, "target": version}


async def follow(session: ClientSession, operation: str, **headers: str) -> list[dict[str, Any]]:
    async with session.get(f"{CONTROL_PREFIX}/swaps/{operation}/events", headers=headers) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = await response.text()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_no_route_works_without_a_valid_token(ports: Ports, method: str, path: str) -> None:
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        async with ports.anonymous.request(method, CONTROL_PREFIX + path, json={}, headers=header) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"].startswith("Bearer")
            assert (await response.json())["error"]["code"] == "Unauthenticated"
            assert TOKEN not in await response.text()


async def test_probes_and_metrics_need_none(ports: Ports) -> None:
    for path, text in (("/livez", "ok"), ("/readyz", "ok"), ("/metrics", "modelswap_engine_state")):
        async with ports.anonymous.get(path) as response:
            assert response.status == 200
            assert text in await response.text()
    async with ports.anonymous.post("/livez") as response:
        assert response.status == 401
    async with ports.anonymous.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as response:
        assert (await response.text()).endswith("# EOF\n")


async def test_state_has_an_entity_tag(ports: Ports) -> None:
    async with ports.control.get(f"{CONTROL_PREFIX}/state") as response:
        state = await response.json()
        tag = response.headers["ETag"]
    assert tag == f'"{state["bootId"]}.{state["seq"]}"'
    assert state["live"]["version"] == "1.0"
    assert state["ready"] is True
    async with ports.control.get(f"{CONTROL_PREFIX}/state", headers={"If-None-Match": tag}) as response:
        assert response.status == 304


async def test_a_swap_is_accepted_followed_and_remembered(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    async with ports.control.post(f"{CONTROL_PREFIX}/swaps", json=order(ports, target)) as response:
        assert response.status == 202
        assert response.headers["Location"] == f"{CONTROL_PREFIX}/swaps/op-1"
    statuses = await follow(ports.control, "op-1")
    assert statuses[-1]["state"] == "Serving"
    assert [status["seq"] for status in statuses] == sorted({status["seq"] for status in statuses})
    assert (await follow(ports.control, "op-1", **{"Last-Event-ID": "999"}))[-1]["state"] == "Serving"
    status, again = await call(ports.control, "POST", "/swaps", order(ports, target))
    assert (status, again["state"]) == (202, "Serving")
    assert (await call(ports.control, "GET", "/swaps/op-1"))[1]["state"] == "Serving"
    async with ports.anonymous.get("/metrics") as response:
        text = await response.text()
    for line in (
        'modelswap_swap_total{outcome="Serving"} 1.0',
        "modelswap_commit_window_seconds_count 1.0",
        "modelswap_pause_duration_seconds_count 1.0",
        'modelswap_swap_duration_seconds_count{phase="commit"} 1.0',
        'modelswap_fetched_bytes_total{from="source"} 2.0',
        f'modelswap_active_version_info{{digest="{target.digest}",version="1.1"}} 1.0',
        'modelswap_engine_state{state="ready"} 1.0',
    ):
        assert line in text


async def test_rollback_puts_the_retained_version_back(ports: Ports) -> None:
    await ports.swap(ports.publish("1.1", norm=b"N" * 2), "op-1")
    fence = Fence(pod_uid=POD, owner_uid="owner-1", epoch=1, revision=2)
    body = {"operationId": "op-2", "fence": {"podUid": POD, "ownerUid": "owner-1", "epoch": 1, "revision": 2}}
    assert fence.revision == 2
    status, _ = await call(ports.control, "POST", "/rollback", body)
    assert status == 202
    assert (await follow(ports.control, "op-2"))[-1]["state"] == "Serving"
    assert (await call(ports.control, "GET", "/state"))[1]["live"]["version"] == "1.0"


async def test_the_retained_version_can_be_given_up(ports: Ports) -> None:
    fence = {"podUid": POD, "ownerUid": "cli", "revision": 2}
    status, body = await call(ports.control, "POST", "/release", {"fence": fence})
    assert (status, body["error"]["code"]) == (404, "NotFound")
    await ports.swap(ports.publish("1.1", norm=b"N" * 2), "op-1")
    status, state = await call(ports.control, "POST", "/release", {"fence": fence})
    assert (status, state["previous"], state["memory"]["previousBytes"]) == (200, None, 0)
    status, body = await call(ports.control, "POST", "/release", {"fence": {**fence, "podUid": "other"}})
    assert (status, body["error"]["code"]) == (421, "WrongPod")


async def test_snapshots_are_off_unless_the_engine_was_started_with_them(ports: Ports) -> None:
    for action, code in (("Snapshot", "BadRequest"), ("Compare", "BadRequest"), ("Other", "BadRequest")):
        status, body = await call(ports.control, "POST", "/check", {"action": action})
        assert (status, body["error"]["code"]) == (400, code)


async def test_who_decided_on_another_state_is_told(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    stale = {"If-Match": '"boot.1"'}
    status, body = await call(ports.control, "POST", "/swaps", order(ports, target), **stale)
    assert (status, body["error"]["code"]) == (412, "StateMoved")
    assert (await call(ports.control, "GET", "/swaps/op-1"))[0] == 404
    current = {"If-Match": ports.coordinator.etag()}
    assert (await call(ports.control, "POST", "/swaps", order(ports, target), **current))[0] == 202


@pytest.mark.parametrize(
    ("fence", "status", "code"), [({"podUid": "pod-2"}, 421, "WrongPod"), ({"ownerUid": "other"}, 409, "ForeignOwner")]
)
async def test_fences(ports: Ports, fence: dict[str, Any], status: int, code: str) -> None:
    await ports.swap(ports.publish("1.1", norm=b"N" * 2), "op-0")
    answer = await call(ports.control, "POST", "/swaps", order(ports, ports.template, **fence))
    assert (answer[0], answer[1]["error"]["code"]) == (status, code)


async def test_a_refused_version_says_why_and_what_next(ports: Ports) -> None:
    missing = VersionRef(version="9", uri="file:///models/9")
    await call(ports.control, "POST", "/swaps", order(ports, missing))
    last = (await follow(ports.control, "op-1"))[-1]
    assert (last["state"], last["error"]["code"]) == ("Aborted", "SourceNotFound")
    status, body = await call(ports.control, "POST", "/plan", {"target": {"uri": "file:///models/9"}})
    assert (status, body["error"]["code"]) == (422, "SourceNotFound")


async def test_plan_check_pause_resume_and_cancel(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    status, plan = await call(ports.control, "POST", "/plan", {"target": {"uri": target.uri}})
    assert (status, plan["changedTensors"], plan["changedNames"]) == (200, 1, ["norm"])
    async with ports.control.post(f"{CONTROL_PREFIX}/check") as response:  # a body may be left out
        assert (await response.json())["checked"] == 2
    status, state = await call(ports.control, "POST", "/pause", {"leaseId": "l", "owner": "me", "seconds": 60})
    assert (status, state["gate"]["open"], state["gate"]["leaseOwner"]) == (200, False, "me")
    status, state = await call(ports.control, "POST", "/resume", {"leaseId": "l", "owner": "me"})
    assert (status, state["gate"]["open"]) == (200, True)
    status, body = await call(ports.control, "POST", "/swaps/none/cancel", {"fence": {"podUid": POD}})
    assert (status, body["error"]["code"]) == (404, "NotFound")


async def test_a_client_that_goes_away_cancels_nothing(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    ports.sources.hanging.add(target.uri)
    await call(ports.control, "POST", "/swaps", order(ports, target))
    async with ports.control.get(f"{CONTROL_PREFIX}/swaps/op-1/events") as response:
        await response.content.readline()
    assert ports.coordinator.operation("op-1").state.terminal is False
    status, _ = await call(
        ports.control,
        "POST",
        "/swaps/op-1/cancel",
        {"fence": {"podUid": POD, "ownerUid": "owner-1", "epoch": 1, "revision": 1}},
    )
    assert status == 200
    assert (await follow(ports.control, "op-1"))[-1]["error"]["code"] == "Cancelled"


async def test_a_swap_waits_once_it_has_staged_until_it_is_told_to_go_on(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    await call(ports.control, "POST", "/swaps", {**order(ports, target), "hold": {"seconds": 60, "mark": "how"}})
    async with ports.control.get(f"{CONTROL_PREFIX}/swaps/op-1/events") as response:
        async for line in response.content:
            if line.startswith(b"data: ") and json.loads(line[6:])["hold"]["held"]:
                break
    fence = {"podUid": POD, "ownerUid": "owner-1", "epoch": 1, "revision": 1}
    status, held = await call(ports.control, "POST", "/swaps/op-1/hold", {"fence": fence, "seconds": 600})
    assert (status, held["state"], held["hold"]["mark"]) == (200, "Staged", "how")
    assert 60 < held["hold"]["secondsLeft"] <= 600
    status, state = await call(ports.control, "GET", "/state")
    assert (state["live"]["version"], state["ready"], state["operation"]["hold"]["held"]) == ("1.0", True, True)
    foreign = {"fence": {**fence, "podUid": "other"}}
    status, body = await call(ports.control, "POST", "/swaps/op-1/proceed", foreign)
    assert (status, body["error"]["code"]) == (421, "WrongPod")
    status, told = await call(ports.control, "POST", "/swaps/op-1/proceed", {"fence": {**fence, "revision": 2}})
    assert (status, told["revision"]) == (200, 2)
    assert (await follow(ports.control, "op-1"))[-1]["state"] == "Serving"
    assert (await call(ports.control, "GET", "/state"))[1]["live"]["version"] == "1.1"


async def test_several_may_follow_one_operation(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    await call(ports.control, "POST", "/swaps", order(ports, target))
    ends = await asyncio.gather(*(follow(ports.control, "op-1") for _ in range(5)))
    assert {statuses[-1]["state"] for statuses in ends} == {"Serving"}


async def test_bodies_have_a_limit(ports: Ports) -> None:
    async with ports.control.post(f"{CONTROL_PREFIX}/swaps", data=b" " * (1024 * 1024 + 1)) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, "TooLarge")


async def test_unknown_routes_are_typed(ports: Ports) -> None:
    async with ports.control.get("/nothing") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "NotFound")
    async with ports.control.delete(f"{CONTROL_PREFIX}/state") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "MethodNotAllowed")


async def test_what_is_answered_is_what_the_protocol_says(ports: Ports) -> None:
    from modelswap_engine.protocol.codec import decode

    async with ports.control.get(f"{CONTROL_PREFIX}/state") as response:
        assert decode(await response.read(), EngineState).live == ports.coordinator.state().live
    assert SwapRequest(operation_id="x", target=VersionRef()).fence == Fence()
