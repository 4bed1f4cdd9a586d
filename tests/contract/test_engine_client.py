"""The operator's client against a control port that speaks the protocol, and against ones that do not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from modelswap_engine.protocol.errors import Busy, StateMoved, Unauthenticated, WrongPod
from modelswap_engine.protocol.messages import (
    CancelRequest,
    Fence,
    PlanRequest,
    SwapRequest,
    VersionRef,
)
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.version import CONTROL_PREFIX
from modelswap_operator.effects.engine_client import (
    BODY_LIMIT,
    Address,
    EngineClient,
    EngineFailed,
    EngineProtocolUnsupported,
    EngineTimeout,
    EngineUnreachable,
    Timeouts,
)
from modelswap_operator.effects.tokens import NoTokens
from tests.support.fake_sidecar import Content, FakeSidecar

UID = "uid-1"
OLD = VersionRef(version="1.0", uri="file:///m/1.0", digest="sha256:" + "a" * 64)
NEW = VersionRef(version="1.1", uri="file:///m/1.1", digest="sha256:" + "b" * 64)
CONTENTS = {OLD.uri: Content(OLD.digest), NEW.uri: Content(NEW.digest)}


class CountingTokens:
    """A token per pod, and how often it was dropped."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    async def token(self, pod_uid: str) -> str | None:
        return f"token-of-{pod_uid}"

    def forget(self, pod_uid: str) -> None:
        self.forgotten.append(pod_uid)


@pytest.fixture
async def sidecar() -> AsyncIterator[FakeSidecar]:
    found = FakeSidecar(pod_uid=UID, contents=CONTENTS, live=OLD)
    yield found
    await found.stop()


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(NoTokens(), timeouts=Timeouts(connect=1.0, call=5.0, plan=5.0)) as found:
        yield found


@pytest.fixture
async def serve() -> AsyncIterator[
    Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[Address]]
]:
    """Serve one handler for the state route, whatever it answers."""
    runners = []

    async def begin(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Address:
        app = web.Application()
        app.router.add_get(f"{CONTROL_PREFIX}/state", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return at(runner.addresses[0][1])

    yield begin
    for runner in runners:
        await runner.cleanup()


def at(port: int) -> Address:
    return Address(pod="pod-1", uid=UID, ip="127.0.0.1", port=port)


def order(state_revision: int = 1, uid: str = UID) -> SwapRequest:
    fence = Fence(pod_uid=uid, owner_uid="owner", epoch=1, revision=state_revision)
    return SwapRequest(operation_id=f"r{state_revision}", fence=fence, target=NEW)


async def test_a_swap_is_started_on_the_state_that_was_read_and_seen_to_its_end(
    sidecar: FakeSidecar, client: EngineClient
) -> None:
    pod = at(await sidecar.start("127.0.0.1", 0))
    before = await client.state(pod)
    assert before.live == OLD
    plan = await client.plan(pod, PlanRequest(target=VersionRef(version="1.1", uri=NEW.uri)))
    assert (plan.from_digest, plan.to_digest, plan.changed_tensors) == (OLD.digest, NEW.digest, 2)
    accepted = await client.swap(pod, order(), if_match=f'"{before.boot_id}.{before.seq}"')
    assert not accepted.state.terminal
    while (state := await client.state(pod)).operation is None or not state.operation.state.terminal:
        await asyncio.sleep(0.01)
    assert state.live == NEW


async def test_a_moved_state_and_a_foreign_pod_are_told_apart(sidecar: FakeSidecar, client: EngineClient) -> None:
    pod = at(await sidecar.start("127.0.0.1", 0))
    with pytest.raises(StateMoved):
        await client.swap(pod, order(), if_match='"other.7"')
    with pytest.raises(WrongPod):
        await client.swap(pod, order(uid="uid-2"), if_match="*")
    sidecar.pod_uid = "uid-2"
    with pytest.raises(WrongPod, match="uid-2 answers"):
        await client.state(pod)


async def test_cancel_aborts_before_commit_and_is_refused_after(sidecar: FakeSidecar, client: EngineClient) -> None:
    pod = at(await sidecar.start("127.0.0.1", 0))
    sidecar.hold_at = SwapState.COMMITTED
    await client.swap(pod, order(), if_match="*")
    while (await client.state(pod)).operation.state is not SwapState.COMMITTING:  # type: ignore[union-attr]
        await asyncio.sleep(0.005)
    with pytest.raises(Busy):
        await client.cancel(pod, "r1", CancelRequest())


async def test_a_refused_token_is_dropped(sidecar: FakeSidecar) -> None:
    sidecar.audience = UID
    tokens = CountingTokens()
    async with EngineClient(tokens) as client:
        with pytest.raises(Unauthenticated):
            await client.state(at(await sidecar.start("127.0.0.1", 0)))
    assert tokens.forgotten == [UID]


async def test_nobody_there_is_unreachable(client: EngineClient, unused_port: int) -> None:
    with pytest.raises(EngineUnreachable, match=f"127.0.0.1:{unused_port}"):
        await client.state(at(unused_port))


async def test_silence_is_a_timeout(serve: Callable[..., Awaitable[Address]]) -> None:
    never = asyncio.Event()

    async def silent(_: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    pod = await serve(silent)
    async with EngineClient(NoTokens(), timeouts=Timeouts(call=0.05)) as client:
        with pytest.raises(EngineTimeout, match="pod-1 did not answer"):
            await client.state(pod)
    never.set()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>hello</html>"),
        (200, b"[]"),
        (502, b"bad gateway"),
        (302, b""),
        (200, b'{"seq": "seven"}'),
        (500, b'{"error": 3}'),
    ],
)
async def test_other_servers_are_recognised(
    status: int, body: bytes, client: EngineClient, serve: Callable[..., Awaitable[Address]]
) -> None:
    async def other(_: web.Request) -> web.Response:
        return web.Response(
            status=status, body=body, headers={"Location": "http://127.0.0.1:1/"} if status == 302 else {}
        )

    with pytest.raises(EngineFailed, match="not this protocol"):
        await client.state(await serve(other))


async def test_an_endless_answer_is_cut_off(client: EngineClient, serve: Callable[..., Awaitable[Address]]) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            for _ in range(BODY_LIMIT // 65536 + 64):
                await answer.write(b" " * 65536)
        except ConnectionError:
            pass
        return answer

    with pytest.raises(EngineFailed, match="larger than"):
        await client.state(await serve(endless))


async def test_an_ancient_protocol_is_named(client: EngineClient, serve: Callable[..., Awaitable[Address]]) -> None:
    async def ancient(_: web.Request) -> web.Response:
        return web.json_response({"protocolVersion": 0})

    with pytest.raises(EngineProtocolUnsupported, match="protocol 0"):
        await client.state(await serve(ancient))


async def test_unknown_fields_are_ignored(client: EngineClient, serve: Callable[..., Awaitable[Address]]) -> None:
    async def newer(_: web.Request) -> web.Response:
        return web.json_response({"protocolVersion": 7, "podUid": UID, "bootId": "b", "colour": "green"})

    assert (await client.state(await serve(newer))).boot_id == "b"


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
