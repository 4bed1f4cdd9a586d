"""LoRA adapters through both ports: the control routes, the command line, and requests that name an adapter."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientResponse
from typer.testing import CliRunner, Result

from modelswap_engine.backends.port import FinishReason
from modelswap_engine.cli.main import app
from modelswap_engine.protocol.adapters import AdapterState
from modelswap_engine.protocol.errors import WorkerLost
from modelswap_engine.protocol.messages import PauseRequest, ResumeRequest
from modelswap_engine.protocol.version import CONTROL_PREFIX
from tests.support.ports import MODEL, POD, Ports
from tests.support.scripted_backend import Script


async def call(ports: Ports, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with ports.control.request(method, CONTROL_PREFIX + path, json=body, headers=headers) as response:
        return response.status, await response.json()


def order(ports: Ports, name: str, content: str = "one", *, revision: int = 1, **source: Any) -> dict[str, Any]:
    uri = ports.opener.put(f"file:///adapters/{content}", content)
    fence = {"podUid": POD, "ownerUid": "owner-1", "epoch": 1, "revision": revision}
    return {"fence": fence, "source": {"name": name, "uri": uri, **source}}


async def load(ports: Ports, name: str, content: str = "one", *, revision: int = 1) -> dict[str, Any]:
    status, body = await call(ports, "POST", "/adapters", order(ports, name, content, revision=revision))
    assert status == 200, body
    found: dict[str, Any] = body
    return found


async def chat(ports: Ports, model: str, **fields: Any) -> ClientResponse:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, **fields}
    return await ports.data.post("/v1/chat/completions", json=body)


async def test_an_adapter_is_loaded_listed_used_and_unloaded(ports: Ports) -> None:
    loaded = await load(ports, "team/support-de")
    assert (loaded["state"], loaded["slot"], loaded["revision"]) == ("Ready", 0, 1)
    assert (await call(ports, "GET", "/adapters/team/support-de"))[1] == loaded | {
        "idleSeconds": pytest.approx(0, abs=9)
    }
    status, view = await call(ports, "GET", "/adapters")
    assert (status, view["slots"], view["slotsUsed"], [a["id"] for a in view["adapters"]]) == (
        200,
        2,
        1,
        [loaded["id"]],
    )
    assert (await call(ports, "GET", "/state"))[1]["adapters"]["adapters"][0]["id"] == loaded["id"]

    response = await chat(ports, "team/support-de")
    body = await response.json()
    assert (response.status, body["model"], ports.backend.asked[-1].adapter) == (200, "team/support-de", loaded["id"])
    assert response.headers["x-modelswap-adapter"] == loaded["id"]
    assert response.headers["x-modelswap-adapter-digest"] == loaded["digest"]
    async with ports.data.get("/v1/models") as response:
        cards = (await response.json())["data"]
    assert [(card["id"], card["parent"], card["digest"]) for card in cards[1:]] == [
        ("team/support-de", MODEL, loaded["digest"])
    ]
    async with ports.data.get("/v1/models/team/support-de") as response:
        assert await response.json() == cards[1]

    fence = order(ports, "x", revision=2)["fence"]
    status, gone = await call(ports, "DELETE", "/adapters/team/support-de", {"fence": fence})
    assert (status, gone["state"], ports.host.held) == (200, "Unloaded", set())
    response = await chat(ports, "team/support-de")
    assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
    status, body = await call(ports, "DELETE", "/adapters/team/support-de", {"fence": fence | {"revision": 3}})
    assert (status, body["error"]["code"]) == (404, "AdapterNotFound")


async def test_the_base_answers_for_itself_only(ports: Ports) -> None:
    await load(ports, "a")
    response = await chat(ports, MODEL)
    assert (response.status, ports.backend.asked[-1].adapter) == (200, "")
    assert "x-modelswap-adapter" not in response.headers
    asked = len(ports.backend.asked)
    for name in ("b", "a@", "A", ""):
        response = await chat(ports, name)
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert len(ports.backend.asked) == asked


async def test_a_name_that_went_while_its_request_waited_is_not_found(ports: Ports) -> None:
    """Gate first, then the lock, then the adapter: what is acquired is what is there after the gate."""
    await load(ports, "a")
    await load(ports, "b")
    await ports.coordinator.leases.take(PauseRequest(lease_id="l", owner="o"))
    waiting = [asyncio.ensure_future(chat(ports, name)) for name in ("a", "b")]
    while ports.coordinator.state().gate.queued < 2:
        await asyncio.sleep(0)
    assert ports.desk.status("a").references == 0
    await call(ports, "DELETE", "/adapters/a", {"fence": order(ports, "x", revision=2)["fence"]})
    replaced = await load(ports, "b", "two", revision=2)
    await ports.coordinator.leases.give_back(ResumeRequest(lease_id="l", owner="o"))
    gone, other = await asyncio.gather(*waiting)
    assert (gone.status, (await gone.json())["error"]["code"]) == (404, "model_not_found")
    assert (other.status, ports.backend.asked[-1].adapter) == (200, replaced["id"])


@pytest.mark.parametrize(
    ("script", "stream"),
    [
        (Script([b"hello"]), False),
        (Script([b"hello"]), True),
        (Script([b"he"], finish=FinishReason.ERROR, error="broken"), True),
        (Script([b"he"], finish=FinishReason.ABORT), False),
        (Script([b"he"], raises=WorkerLost("gone")), True),
        (Script([b"he"], raises=RuntimeError("defect")), True),
        (Script([], finish=None), False),
        (Script(refuses=WorkerLost("gone")), False),
    ],
)
async def test_on_every_path_it_is_given_back_once(ports: Ports, script: Script, stream: bool) -> None:
    await load(ports, "a")
    ports.backend.script = script
    response = await chat(ports, "a", stream=stream)
    await response.read()
    assert (ports.desk.status("a").references, ports.coordinator.state().gate.in_flight) == (0, 0)
    # Bad requests are refused after it was acquired, too.
    await (await chat(ports, "a", max_tokens=10**6)).read()
    assert ports.desk.status("a").references == 0


async def test_a_client_that_goes_away_gives_it_back(ports: Ports) -> None:
    await load(ports, "a")
    begun, never = asyncio.Event(), asyncio.Event()

    async def begin() -> None:
        begun.set()
        await never.wait()

    ports.backend.script = Script([b"he", begin])
    asking = asyncio.ensure_future(chat(ports, "a", stream=True))
    response = await asking
    await begun.wait()
    assert ports.desk.status("a").references == 1
    status, body = await call(
        ports, "DELETE", "/adapters/a", {"fence": order(ports, "x", revision=2)["fence"], "drainTimeoutSeconds": 0}
    )
    assert (status, body["state"], body["references"]) == (202, AdapterState.TOMBSTONE, 1)
    response.close()
    while ports.desk.contents():
        await asyncio.sleep(0)
    assert ports.host.held == set()


async def test_an_assignment_is_followed_and_sources_are_looked_up(ports: Ports) -> None:
    uris = [ports.opener.put(f"file:///adapters/{content}", content) for content in ("one", "two")]
    assigned = [{"name": f"a{n}", "sources": [{"uri": uri}], "podUIDs": None} for n, uri in enumerate(uris)]
    fence = {"podUid": POD, "ownerUid": "owner-1", "epoch": 1, "revision": 3}
    status, view = await call(ports, "PUT", "/adapters", {"fence": fence, "adapters": assigned})
    assert (status, view["assigned"]["revision"]) == (200, 3)
    told = view["assigned"]
    while told["open"]:
        told = (await call(ports, "GET", "/state"))[1]["adapters"]["assigned"]
    assert told == {
        "ownerUid": "owner-1", "epoch": 1, "revision": 3, "adapters": 2, "open": 0, "problems": [],
    }  # fmt: skip
    missing = [*assigned, {"name": "b", "sources": [{"uri": "file:///nothing"}]}]
    await call(ports, "PUT", "/adapters", {"fence": fence | {"revision": 4}, "adapters": missing})
    while (await call(ports, "GET", "/state"))[1]["adapters"]["assigned"]["open"]:
        await asyncio.sleep(0)
    async with ports.anonymous.get("/metrics") as response:
        assert "modelswap_adapter_problems 1.0" in await response.text()
    stale = {"fence": fence | {"revision": 2}, "adapters": []}
    assert (await call(ports, "PUT", "/adapters", stale))[1]["error"]["code"] == "StaleRevision"
    unknown = {"sources": [{"name": "x", "uri": uris[0]}, {"name": "y", "uri": "file:///nothing"}]}
    status, found = await call(ports, "POST", "/adapters/resolve", unknown)
    assert (status, found["adapters"][0]["digest"]) == (200, ports.desk.status("a0").digest)
    assert found["adapters"][1]["error"]["code"] == "SourceNotFound"


async def test_what_cannot_be_served_says_why(ports: Ports) -> None:
    for change, status, code in [
        ({"uri": "file:///nothing"}, 422, "SourceNotFound"),
        ({"baseDigest": "sha256:" + "0" * 64}, 422, "IncompatibleAdapter"),
        ({"digest": "sha256:" + "0" * 64}, 422, "DigestMismatch"),
        ({"name": "bad name"}, 400, "BadRequest"),
        ({"name": "a\n"}, 400, "BadRequest"),
        ({"name": MODEL}, 400, "BadRequest"),
    ]:
        wanted = order(ports, "a")
        answer = await call(ports, "POST", "/adapters", wanted | {"source": wanted["source"] | change})
        assert (answer[0], answer[1]["error"]["code"]) == (status, code), answer
    answer = await call(ports, "POST", "/adapters", order(ports, "a"), **{"If-Match": '"other.1"'})
    assert (answer[0], answer[1]["error"]["code"]) == (412, "StateMoved")
    wanted = order(ports, "a")
    answer = await call(ports, "POST", "/adapters", wanted | {"fence": wanted["fence"] | {"podUid": "other"}})
    assert answer[0] == 421
    assert ports.desk.contents() == ()


async def test_metrics_count_adapters(ports: Ports) -> None:
    await load(ports, "a")
    async with ports.anonymous.get("/metrics") as response:
        text = await response.text()
    assert 'modelswap_adapters{state="Ready"} 1.0' in text
    assert "modelswap_adapter_slots_used 1.0" in text


async def run(ports: Ports, *arguments: str) -> Result:
    variables = {"MODELSWAP_URL": ports.control_url, "MODELSWAP_TOKEN_FILE": str(ports.tokens), "COLUMNS": "200"}
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=variables)


async def test_the_command_line(ports: Ports) -> None:
    ports.opener.put("file:///adapters/one", "one")
    ports.opener.put("file:///adapters/two", "two")
    done = await run(ports, "adapter", "load", "team/a", "--source", "file:///adapters/one", "--pinned", "-o", "json")
    assert done.exit_code == 0, done.output
    first = json.loads(done.stdout)
    assert (first["state"], first["pinned"], first["ownerUid"]) == ("Ready", True, "cli")
    done = await run(ports, "adapter", "load", "team/a", "--source", "file:///adapters/two")
    assert done.exit_code == 0, done.output
    assert "Ready" in done.stdout
    listed = await run(ports, "adapter", "list")
    assert "1 of 2 slots" in listed.stdout
    assert ports.desk.status("team/a").id in listed.stdout
    assert ports.desk.status("team/a").id in (await run(ports, "state")).stdout
    done = await run(ports, "adapter", "unload", "team/a")
    assert (done.exit_code, "Unloaded" in done.stdout) == (0, True), done.output
    done = await run(ports, "adapter", "unload", "team/a")
    assert done.exit_code == 1
    assert "AdapterNotFound" in repr(done.exception) or "no adapter" in str(done.exception)
