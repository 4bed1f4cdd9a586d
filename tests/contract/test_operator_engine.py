"""The operator's client against the engine's real control port: what the planner takes for granted, the engine does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from modelswap_engine.protocol.adapter_calls import AssignAdaptersRequest, ResolveAdaptersRequest
from modelswap_engine.protocol.adapters import AdapterRegistry, AdapterSource, AdapterState
from modelswap_engine.protocol.assignment import (
    AssignedAdapter,
    AssignedSource,
    Assignment,
    AssignmentTarget,
    WeightsPolicy,
)
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import (
    ModelswapError,
    NotFound,
    Refused,
    SourceNotFound,
    SourceUnreadable,
    StaleRevision,
    StateMoved,
    Unauthenticated,
    WrongPod,
)
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.protocol.messages import Fence, PlanRequest, SwapRequest, VersionRef
from modelswap_operator.effects.engine_client import Address, EngineClient
from modelswap_operator.planning.assess import followed, proved
from modelswap_operator.planning.errors import is_content, of_adapter
from modelswap_operator.planning.operations import operation_id
from tests.support.ports import POD, TOKEN, Ports, open_ports
from tests.support.tensor_files import packed

OWNER = "owner-1"


class OneToken:
    """The token that the sidecar knows."""

    def __init__(self, token: str = TOKEN) -> None:
        self._token = token

    async def token(self, pod_uid: str) -> str | None:
        return self._token

    def forget(self, pod_uid: str) -> None:
        return None


@dataclass
class Pair:
    """A sidecar, and the operator's way to it."""

    ports: Ports
    client: EngineClient
    pod: Address

    def order(self, state: EngineState, target: VersionRef, *, revision: int, epoch: int = 1) -> SwapRequest:
        return SwapRequest(
            operation_id=operation_id(owner_uid=OWNER, revision=revision, pod_uid=POD, state=state),
            fence=Fence(pod_uid=POD, owner_uid=OWNER, epoch=epoch, revision=revision),
            target=target,
        )

    async def assign(self, *items: AssignedAdapter, revision: int) -> AdapterRegistry:
        """Send an assignment of adapters, and read the state until it is followed."""
        fence = Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=revision)
        await self.client.assign_adapters(self.pod, AssignAdaptersRequest(fence=fence, adapters=list(items)))
        while True:
            found = (await self.client.state(self.pod)).adapters
            assert found is not None
            assert found.assigned is not None
            assert found.assigned.revision == revision
            if not found.assigned.open:
                return found
            await asyncio.sleep(0.01)

    async def emptied(self) -> None:
        """Read the state until no adapter is left: an assignment is followed before the engine has dropped one."""
        while (found := (await self.client.state(self.pod)).adapters) is None or found.adapters:
            await asyncio.sleep(0.01)

    async def swap(self, target: VersionRef, *, revision: int) -> EngineState:
        """Start on the state as read, again where it moved, and follow by reading the state, as the operator does."""
        order = await self._begun(target, revision=revision)
        while True:
            state = await self.client.state(self.pod)
            assert state.operation is not None
            assert state.operation.operation_id == order.operation_id
            if state.operation.state.terminal:
                return state
            await asyncio.sleep(0.01)

    async def _begun(self, target: VersionRef, *, revision: int) -> SwapRequest:
        while True:
            state = await self.client.state(self.pod)
            order = self.order(state, target, revision=revision)
            with contextlib.suppress(StateMoved):  # what was kept is let go after an operation has ended
                await self.client.swap(self.pod, order, if_match=f'"{state.boot_id}.{state.seq}"')
                return order


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with open_ports(tmp_path) as ports, EngineClient(OneToken()) as client:
        url = urlsplit(ports.control_url)
        yield Pair(ports, client, Address(pod="pod", uid=POD, ip=str(url.hostname), port=int(url.port or 0)))


async def test_a_state_at_rest_is_proved_and_its_tag_stands_still(pair: Pair) -> None:
    first = await pair.client.state(pair.pod)
    assert proved(first, pair.ports.template.digest)
    target = pair.ports.publish("1.1", norm=b"N" * 2)
    plan = await pair.client.plan(pair.pod, PlanRequest(target=VersionRef(version="1.1", uri=target.uri)))
    assert (plan.from_digest, plan.to_digest, plan.refusals) == (
        first.live.digest if first.live else "",
        target.digest,
        [],
    )
    assert (plan.changed_tensors, plan.total_tensors) == (1, 2)
    second = await pair.client.state(pair.pod)
    assert (second.boot_id, second.seq) == (first.boot_id, first.seq)


async def test_a_swap_ends_proved_under_its_revision_and_goes_back_the_same_way(pair: Pair) -> None:
    target = pair.ports.publish("1.1", norm=b"N" * 2)
    state = await pair.swap(target, revision=3)
    assert proved(state, target.digest)
    assert (state.owner_uid, state.epoch, state.revision) == (OWNER, 1, 3)
    assert state.live == target
    assert state.operation is not None
    assert state.operation.revision == 3
    assert state.operation.target.digest == target.digest
    back = await pair.swap(pair.ports.template, revision=4)
    assert proved(back, pair.ports.template.digest)
    assert back.operation is not None
    assert back.operation.bytes_fetched == 0  # the tensors were kept


async def test_another_label_for_the_same_content_is_told_without_a_commit(pair: Pair) -> None:
    same = VersionRef(version="1.0-signed", uri=pair.ports.template.uri, digest=pair.ports.template.digest)
    state = await pair.swap(same, revision=1)
    assert state.live is not None
    assert (state.live.version, state.live.digest) == ("1.0-signed", pair.ports.template.digest)
    assert state.operation is not None
    assert state.operation.commit_window_microseconds is None


async def test_a_wrong_pin_is_a_content_failure_of_the_plan(pair: Pair) -> None:
    target = pair.ports.publish("1.1", norm=b"N" * 2)
    wrong = VersionRef(version="1.1", uri=target.uri, digest="sha256:" + "9" * 64)
    errors = []
    try:
        errors = (await pair.client.plan(pair.pod, PlanRequest(target=wrong))).refusals
    except Refused as error:
        errors = [error.body()]
    assert [e.code for e in errors] == ["DigestMismatch"]
    assert is_content(errors[0])


async def test_a_missing_source_may_still_arrive_and_is_tried_again(pair: Pair) -> None:
    with pytest.raises(ModelswapError) as refused:
        await pair.client.plan(pair.pod, PlanRequest(target=VersionRef(version="9", uri="file:///models/9")))
    assert refused.value.code == "SourceNotFound"
    assert not is_content(refused.value.body())


async def test_fencing_is_seen_as_typed_errors(pair: Pair) -> None:
    target = pair.ports.publish("1.1", norm=b"N" * 2)
    state = await pair.swap(target, revision=5)
    template = pair.ports.template
    tag = f'"{state.boot_id}.{state.seq}"'
    with pytest.raises(StaleRevision):
        await pair.client.swap(pair.pod, pair.order(state, template, revision=4), if_match=tag)
    with pytest.raises(StateMoved):
        await pair.client.swap(pair.pod, pair.order(state, template, revision=6), if_match='"other.1"')
    elsewhere = Address(pod="pod", uid="uid-2", ip=pair.pod.ip, port=pair.pod.port)
    with pytest.raises(WrongPod):
        await pair.client.state(elsewhere)
    async with EngineClient(OneToken("wrong")) as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.state(pair.pod)


async def test_a_trainers_weights_are_told_from_a_pod_that_has_gone_astray(pair: Pair) -> None:
    """What ``weights: External`` rests on: the update is let in and proved, and what was decided stays known."""
    ports = pair.ports
    target = ports.publish("1.1", norm=b"N" * 2)
    await pair.swap(target, revision=3)
    stable = AssignmentTarget(version=target.version, uri=target.uri, digest=target.digest)
    ports.assigned = Assignment(owner_uid=OWNER, epoch=1, revision=3, stable=stable)
    route, body = "/compat/sglang/update_weights_from_tensor", packed({"norm": b"T" * 2})
    headers = {"Content-Type": "application/octet-stream"}
    async with ports.control.post(route, data=body, headers=headers) as answer:
        assert answer.status == 409
    ports.assigned = msgspec.structs.replace(ports.assigned, weights=WeightsPolicy.EXTERNAL)
    async with ports.control.post(route, data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    state = await pair.client.state(pair.pod)
    assert state.live is not None
    assert state.live.digest not in ("", target.digest)
    assert not proved(state, target.digest)
    assert followed(state, target.digest)
    assert not followed(state, ports.template.digest)
    back = await pair.swap(ports.template, revision=4)
    assert proved(back, ports.template.digest)
    assert not followed(back, target.digest)


async def test_adapters_are_looked_up_assigned_and_exchanged_with_the_base(pair: Pair) -> None:
    """What the operator takes for granted about adapters, and whom a swap blames that fails for one."""
    ports, target = pair.ports, pair.ports.publish("1.1", norm=b"N" * 2)
    bases = {ports.opener.put(f"file:///adapters/{n}", n): b for n, b in (("one", ports.template), ("two", target))}
    asked = [AdapterSource(name="a", uri=uri, base_digest=base.digest) for uri, base in bases.items()]
    found = (await pair.client.resolve_adapters(pair.pod, ResolveAdaptersRequest(sources=asked))).adapters
    sources = [AssignedSource(uri=row.uri, digest=row.digest, base_digest=row.base_digest) for row in found]
    view = await pair.assign(AssignedAdapter(name="a", sources=sources), revision=7)
    assert [(row.name, row.digest, row.owner_uid) for row in view.adapters] == [("a", found[0].digest, OWNER)]
    state = await pair.swap(target, revision=3)
    assert state.adapters is not None
    assert [row.digest for row in state.adapters.adapters if row.state == "Ready"] == [found[1].digest]

    wrong = msgspec.structs.replace(sources[0], digest="sha256:" + "9" * 64)
    await pair.assign(AssignedAdapter(name="a", sources=[wrong, sources[1]]), revision=8)
    state = await pair.swap(ports.template, revision=4)
    assert state.operation is not None
    assert state.operation.error is not None
    assert (state.operation.error.code, of_adapter(state.operation.error)) == ("DigestMismatch", True)
    assert not is_content(state.operation.error)
    assert proved(state, target.digest)
    view = await pair.assign(revision=9)
    assert {row.state for row in view.adapters} <= {AdapterState.DRAINING}  # no name leads to it
    await pair.emptied()


async def test_the_source_of_an_adapter_is_looked_at_too(pair: Pair) -> None:
    uri = pair.ports.opener.put("file:///adapters/one", "one")
    asked = ResolveAdaptersRequest(sources=[AdapterSource(name="a", uri=uri)])
    (found,) = (await pair.client.resolve_adapters(pair.pod, asked)).adapters
    request = LookRequest(target=VersionRef(version="a", uri=uri, digest=found.digest))
    seen = await pair.client.look_at_adapter(pair.pod, request)
    assert (seen.found, bool(seen.revision)) == ("", True)
    pair.ports.opener.put(uri, "two")
    known = LookRequest(target=request.target, known=seen.revision)
    assert (await pair.client.look_at_adapter(pair.pod, known)).found.startswith("sha256:")
    del pair.ports.opener.contents[uri]
    with pytest.raises(SourceNotFound):
        await pair.client.look_at_adapter(pair.pod, known)


async def test_the_source_of_what_is_live_is_looked_at_and_no_other(pair: Pair) -> None:
    ports, live = pair.ports, pair.ports.template
    assert await pair.client.look(pair.pod, LookRequest(target=live)) == SourceLook()
    ports.sources.moved[live.uri] = "sha256:" + "9" * 64
    assert (await pair.client.look(pair.pod, LookRequest(target=live))).found == "sha256:" + "9" * 64
    other = ports.publish("1.1", norm=b"N" * 2)
    with pytest.raises(NotFound, match="not where the live version came from"):
        await pair.client.look(pair.pod, LookRequest(target=other))
    ports.sources.errors[live.uri] = SourceUnreadable("503")
    with pytest.raises(SourceUnreadable):
        await pair.client.look(pair.pod, LookRequest(target=live))
