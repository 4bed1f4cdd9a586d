"""What a swap does to requests in flight, and to the endpoints, by traffic mode."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.errors import NotReady
from modelswap_engine.protocol.policy import OnTimeout, Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.settings import SwapSettings
from tests.support.fake_source import FakeCheckpoint
from tests.support.swapping import World, checkpoint, last, request


class Client:
    """One request, as the HTTP layer makes it."""

    def __init__(self, world):
        self._world = world
        self._stack = AsyncExitStack()
        self.admission = None

    async def arrive(self, *, submitted=True):
        self.admission = await self._stack.enter_async_context(self._world.coordinator.admission())
        if submitted:
            self.admission.submitted()
        return self

    async def end(self):
        await self._stack.aclose()


async def begin(world, target, operation_id="op-1", **options):
    await world.coordinator.swap(request(target, operation_id, **options))
    await world.clock.settle()
    return world.coordinator.operation(operation_id)


async def test_a_drain_waits_for_whole_answers_and_holds_new_requests(world, target):
    old = await Client(world).arrive()
    status = await begin(world, target)
    assert status.state is SwapState.PAUSING
    assert "pause" not in world.backend.steps
    new = asyncio.ensure_future(Client(world).arrive())
    await world.clock.advance(5)
    assert not new.done()
    assert world.state.gate.queued == 1
    assert world.coordinator.ready()  # a wait of this kind does not change readiness
    await old.end()
    status = await world.ended("op-1")
    assert status.state is SwapState.SERVING
    assert status.drained_requests == 1
    assert status.pause_seconds >= 5
    assert status.stop_latency_seconds >= 5
    client = await new
    assert client.admission.live == target
    await client.end()
    world.assert_serves(target)


async def test_a_drain_that_takes_too_long_cancels_the_swap(world, target):
    old = await Client(world).arrive()
    await begin(world, target, traffic=Traffic(timeout_seconds=7))
    await world.clock.advance(6.9)
    assert not world.coordinator.operation("op-1").state.terminal
    new = asyncio.ensure_future(Client(world).arrive())
    status = await world.ended("op-1")
    assert status.state is SwapState.ABORTED
    assert status.error.code == "DrainTimeout"
    assert "1 requests" in status.error.message
    world.assert_serves(world.template)
    await (await new).end()
    await old.end()


@pytest.mark.parametrize(
    ("on_timeout", "policy"),
    [(OnTimeout.RECOMPUTE_REQUESTS, RequestPolicy.RECOMPUTE), (OnTimeout.ABORT_REQUESTS, RequestPolicy.ABORT)],
)
async def test_a_drain_that_takes_too_long_may_go_on_without_waiting(world, target, on_timeout, policy):
    old = await Client(world).arrive()
    status = await world.swap(target, traffic=Traffic(timeout_seconds=7, on_timeout=on_timeout))
    assert status.state is SwapState.SERVING
    assert world.backend.policies == [policy]
    await old.end()
    world.assert_serves(target)


@pytest.mark.parametrize("mode", [TrafficMode.RECOMPUTE, TrafficMode.FREEZE])
async def test_requests_cannot_be_continued_on_another_end_of_text(world, mode):
    config = b'{"architectures": ["Tiny"], "hidden_size": 4, "eos_token_id": 3}'
    target = world.publish("1.1", FakeCheckpoint(checkpoint(q=b"QQQQ").tensors, side={"config.json": config}))
    refused = await world.swap(target, traffic=Traffic(mode=mode))
    assert refused.state is SwapState.ABORTED
    assert refused.error.code == "UnsupportedChange"
    old = await Client(world).arrive()
    late = await world.swap(target, "op-2", traffic=Traffic(timeout_seconds=1, on_timeout=OnTimeout.RECOMPUTE_REQUESTS))
    assert late.state is SwapState.ABORTED
    assert "cannot be continued" in late.error.message
    await old.end()
    assert (await world.swap(target, "op-3")).state is SwapState.SERVING


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        (TrafficMode.RECOMPUTE, RequestPolicy.RECOMPUTE),
        (TrafficMode.FREEZE, RequestPolicy.FREEZE),
        (TrafficMode.ABORT, RequestPolicy.ABORT),
    ],
)
async def test_modes_that_do_not_drain_wait_only_for_those_in_admission(world, target, mode, policy):
    streaming, admitting = await Client(world).arrive(), await Client(world).arrive(submitted=False)
    status = await begin(world, target, traffic=Traffic(mode=mode))
    assert status.state is SwapState.PAUSING
    assert "pause" not in world.backend.steps
    admitting.admission.submitted()
    status = await world.ended("op-1")
    assert status.state is SwapState.SERVING
    assert world.backend.policies == [policy]
    await streaming.end()
    await admitting.end()


async def test_a_request_stuck_in_admission_stops_the_swap_not_the_service(world, target):
    stuck = await Client(world).arrive(submitted=False)
    status = await world.swap(target, traffic=Traffic(mode=TrafficMode.RECOMPUTE))
    assert status.state is SwapState.ABORTED
    assert status.error.code == "DrainTimeout"
    world.assert_serves(world.template)
    await stuck.end()


async def test_requests_whose_clients_are_gone_are_ended_after_a_drain(world, target):
    world.backend.requests = 1  # the engine has not noticed that its client left, and never will
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    assert world.backend.policies == [RequestPolicy.ABORT]


@pytest.mark.parametrize("mode", [TrafficMode.FREEZE, TrafficMode.OVERLAP, TrafficMode.ABORT])
async def test_a_mode_that_the_engine_does_not_have_is_refused(world, target, mode):
    world.backend.modes = [TrafficMode.DRAIN, TrafficMode.RECOMPUTE]
    status = await world.swap(target, traffic=Traffic(mode=mode))
    assert status.state is SwapState.ABORTED
    assert status.error.code == "UnsupportedChange"
    assert "Drain, Recompute" in status.error.advice
    assert "stage" not in world.backend.steps


async def test_a_fallback_that_the_engine_does_not_have_is_refused_before_it_is_needed(world, target):
    world.backend.modes = [TrafficMode.DRAIN, TrafficMode.RECOMPUTE]
    status = await world.swap(target, traffic=Traffic(on_timeout=OnTimeout.ABORT_REQUESTS))
    assert status.state is SwapState.ABORTED
    assert "onTimeout AbortRequests" in status.error.message


async def test_with_ready_peers_a_drain_leaves_the_endpoints_before_it_closes(world, target):
    status = await begin(world, target, traffic=Traffic(peers_ready=1))
    assert status.state is SwapState.PREPARED
    assert not world.coordinator.ready()
    assert world.state.reason == "Draining"
    assert world.coordinator.closing
    assert world.state.gate.open
    late = await Client(world).arrive()  # until the endpoints follow, requests still come and are served
    world.coordinator.probe_seen()
    await world.clock.settle()
    assert world.coordinator.operation("op-1").state is SwapState.PAUSING
    await late.end()
    assert (await world.ended("op-1")).state is SwapState.SERVING
    assert not world.coordinator.closing
    world.assert_serves(target)


async def test_without_a_probe_the_wait_for_one_is_bounded(world, target):
    status = await world.swap(target, traffic=Traffic(peers_ready=1))
    assert status.state is SwapState.SERVING
    assert status.total_seconds == pytest.approx(SwapSettings(state_dir=world.folder).probe_seconds)
    world.assert_serves(target)


async def test_cancelled_while_it_leaves_the_endpoints_it_is_ready_again(world, target):
    from modelswap_engine.protocol.messages import CancelRequest

    await begin(world, target, traffic=Traffic(peers_ready=1))
    await world.coordinator.cancel("op-1", CancelRequest(fence=request(target).fence))
    assert (await world.ended("op-1")).state is SwapState.ABORTED
    assert not world.coordinator.closing
    world.assert_serves(world.template)


async def test_a_worker_lost_while_it_leaves_the_endpoints_leaves_no_trace(world, target):
    await begin(world, target, traffic=Traffic(peers_ready=1))
    world.backend.kill()
    assert (await world.ended("op-1")).state is SwapState.ABORTED
    assert not world.coordinator.closing
    world.assert_serves(world.template)


async def test_draining_the_process_serves_clients_until_they_have_moved_away(world):
    old = await Client(world).arrive()
    draining = asyncio.ensure_future(world.coordinator.drain(30))
    await world.clock.settle()
    assert not world.coordinator.ready()
    assert world.coordinator.closing
    late = await Client(world).arrive()
    await old.end()
    await world.clock.advance(10)
    assert not draining.done()
    await late.end()
    await world.clock.settle()
    assert draining.done()
    with pytest.raises(NotReady, match="stopping"):
        await Client(world).arrive()


@pytest.fixture
async def in_cluster(tmp_path):
    """A pod that leaves endpoints by news that has to travel."""
    world = World(tmp_path, propagation_seconds=2.0)
    await world.start()
    yield world
    await world.stop()


async def test_nobody_is_refused_while_requests_still_come_from_nodes_that_have_not_heard(in_cluster):
    world, draining = in_cluster, asyncio.ensure_future(in_cluster.coordinator.drain(600))
    for _ in range(5):  # each is the only one for longer than the news takes on an idle node
        await world.clock.advance(7)
        late = await Client(world).arrive()
        await world.clock.advance(1)
        await late.end()
    await world.clock.advance(7.9)
    assert not draining.done()
    await world.clock.advance(2.2)
    assert draining.done()
    with pytest.raises(NotReady, match="stopping"):
        await Client(world).arrive()


async def test_who_never_hears_is_refused_when_the_time_is_over(in_cluster):
    world, draining = in_cluster, asyncio.ensure_future(in_cluster.coordinator.drain(30))
    for _ in range(5):
        await world.clock.advance(5.5)
        await (await Client(world).arrive()).end()
    await world.clock.advance(3)
    assert draining.done()
    with pytest.raises(NotReady, match="stopping"):
        await Client(world).arrive()


async def test_draining_the_process_ends_with_its_time(world):
    old = await Client(world).arrive()
    await world.clock.run(world.coordinator.drain(30))
    await old.end()


async def test_draining_the_process_drops_a_swap_that_can_be_dropped(world, target):
    old = await Client(world).arrive()
    await begin(world, target)
    draining = asyncio.ensure_future(world.coordinator.drain(30))
    status = await world.clock.run(last(world.coordinator, "op-1"))
    assert status.state is SwapState.ABORTED
    assert status.error.code == "Cancelled"
    await old.end()
    await world.clock.run(draining)
    with pytest.raises(NotReady):
        await world.coordinator.swap(request(target, "op-2"))
