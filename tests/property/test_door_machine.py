"""Random lives of the door: pauses by lease, swaps in every mode, requests that come, wait, tokenize, run and go.

The model is a few lines: which leases there are and until when, which requests wait since when and which are inside.
Whatever the order, the door is open when nobody holds it, nobody passes a closed one, the writer finds inside only whom
its mode allows, and every request leaves no trace. Somebody having paused changes nothing about how a swap ends.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.errors import Busy, DrainTimeout, ForeignOwner, ModelswapError, Paused
from modelswap_engine.protocol.messages import CancelRequest, Fence, PauseRequest, ResumeRequest
from modelswap_engine.protocol.policy import OnTimeout, Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.examples import examples
from tests.support.swapping import OWNER, POD, World, checkpoint, request

CONTENTS = {"1.0": checkpoint(), "1.1": checkpoint(q=b"QQQQ"), "1.2": checkpoint(embed=b"E" * 8)}
QUEUE = 4  # of the world's gate, with a patience of 120 seconds
DRAIN, ADMIT, RECLAIM = 7.0, 3.0, 4.0

leases = st.sampled_from(["a", "b"])
owners = st.sampled_from(["x", "y"])
traffics = st.builds(
    Traffic,
    mode=st.sampled_from(list(TrafficMode)),
    timeout_seconds=st.just(DRAIN),
    on_timeout=st.sampled_from(list(OnTimeout)),
)


class Client:
    """One request: waiting at the door, inside, or over."""

    def __init__(self, world: World, number: int) -> None:
        self.name = f"r{number}"
        self.since = world.clock.now
        self.stack = AsyncExitStack()
        self.admission = None
        self.task = asyncio.ensure_future(self._enter(world))

    async def _enter(self, world: World) -> None:
        self.admission = await self.stack.enter_async_context(world.coordinator.admission(request_id=self.name))


class Door(RuleBasedStateMachine):
    """One pod on fakes, its door and its lock."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.numbers = iter(range(1, 10_000))
        self.held: dict[str, tuple[str, float]] = {}
        self.waiting: list[Client] = []
        self.inside: list[Client] = []
        self.operation = ""
        self.mode = TrafficMode.DRAIN
        self.closures = 0

    def run(self, work):
        return self.runner.run(work)

    @initialize()
    def start(self):
        async def begin():
            self.world = World(
                Path(self.folder.name), admit_seconds=ADMIT, reclaim_seconds=RECLAIM, call_seconds=5, pause_seconds=5
            )
            self.targets = {name: self.world.publish(name, content) for name, content in CONTENTS.items()}
            await self.world.start()
            self._watch_commits()

        self.run(begin())

    def _watch_commits(self) -> None:
        backend, lock = self.world.backend, self.world.coordinator._core.lock
        commit = backend.commit

        async def watched(operation_id, policy):
            # What a writer may find inside is its mode's promise.
            if policy is RequestPolicy.NONE_RUNNING:
                assert lock.inside == 0
            elif policy is not RequestPolicy.OVERLAP:
                assert all(reader.submitted for reader in lock.readers())
            return await commit(operation_id, policy)

        backend.commit = watched

    # Leases.

    @rule(lease=leases, owner=owners, seconds=st.sampled_from([1.0, 5.0, 60.0]))
    def pause(self, lease, owner, seconds):
        async def call():
            holder, was_open = self.held.get(lease), self.world.state.gate.open
            try:
                await self.world.coordinator.leases.take(PauseRequest(lease_id=lease, owner=owner, seconds=seconds))
            except ForeignOwner:
                assert holder is not None
                assert holder[0] != owner
                return
            assert holder is None or holder[0] == owner
            self.closures += was_open
            self.held[lease] = (owner, self.world.clock.now + seconds)

        self.run(call())

    @rule(lease=leases, owner=owners)
    def resume(self, lease, owner):
        async def call():
            holder = self.held.get(lease)
            try:
                await self.world.coordinator.leases.give_back(ResumeRequest(lease_id=lease, owner=owner))
            except ForeignOwner:
                assert holder is not None
                assert holder[0] != owner
                return
            assert holder is None or holder[0] == owner
            self.held.pop(lease, None)

        self.run(call())

    # Requests.

    @precondition(lambda self: len(self.inside) + len(self.waiting) < 8)
    @rule()
    def a_request_comes(self):
        async def come():
            was_open, queued = self.world.state.gate.open, self.world.state.gate.queued
            client = Client(self.world, next(self.numbers))
            await self.world.clock.settle()
            if was_open:
                assert client.admission is not None
                assert client.admission.live == self.world.state.live
                self.inside.append(client)
            elif queued >= QUEUE:
                assert isinstance(client.task.exception(), Paused)
            else:
                assert not client.task.done()
                self.waiting.append(client)

        self.run(come())

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def a_prompt_reaches_the_engine(self, data):
        client = data.draw(st.sampled_from(self.inside))
        self.run(self._act(client.admission.submitted))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def a_request_ends(self, data):
        client = data.draw(st.sampled_from(self.inside))
        self.inside.remove(client)
        self.run(self._close(client))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_client_that_waits_goes_away(self, data):
        client = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(client)

        async def leave():
            client.task.cancel()
            await asyncio.gather(client.task, return_exceptions=True)
            await self._settle()

        self.run(leave())

    # Operations.

    @precondition(lambda self: not self.operation)
    @rule(version=st.sampled_from(sorted(CONTENTS)), traffic=traffics)
    def a_swap_begins(self, version, traffic):
        async def begin():
            self.operation, self.mode = f"op-{next(self.numbers)}", traffic.mode
            self.closures = self.world.state.gate.closures
            wanted = request(self.targets[version], self.operation, revision=next(self.numbers), traffic=traffic)
            await self.world.coordinator.swap(wanted)
            await self._settle()

        self.run(begin())

    @precondition(lambda self: self.operation)
    @rule()
    def the_swap_is_cancelled(self):
        async def cancel():
            fence = Fence(pod_uid=POD, owner_uid=OWNER, epoch=1, revision=next(self.numbers))
            try:
                await self.world.coordinator.cancel(self.operation, CancelRequest(fence=fence))
            except Busy:
                pass
            except ModelswapError as error:
                raise AssertionError(error.message) from error
            await self._settle()

        self.run(cancel())

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 130.0]))
    def time_passes(self, seconds):
        async def passing():
            await self.world.clock.advance(seconds)
            await self._settle()

        self.run(passing())

    # What must be true whenever nothing moves.

    @invariant()
    def the_door_is_as_the_model_says(self):
        if not hasattr(self, "world"):
            return
        self.run(self._settle())
        gate, lock, now = self.world.state.gate, self.world.state.lock, self.world.clock.now
        self.held = {lease: (owner, until) for lease, (owner, until) in self.held.items() if until > now}
        assert {lease.id: lease.owner for lease in gate.leases} == {k: v[0] for k, v in self.held.items()}
        for lease in gate.leases:
            assert abs(lease.seconds_left - (self.held[lease.id][1] - now)) < 1e-6
        assert gate.open == (not self.held and not gate.holders)
        if not self.operation:
            assert gate.holders == []
            assert (lock.writer, lock.readers) == ("", len(self.inside))
        assert gate.queued == len(self.waiting)
        assert not (gate.open and self.waiting)
        assert [reader.request_id for reader in lock.oldest] == [client.name for client in self.inside]
        assert gate.oldest_queued_seconds == max((now - client.since for client in self.waiting), default=0.0)
        assert self.world.backend.violations == []
        assert self.world.state.live is not None

    async def _settle(self) -> None:
        await self.world.clock.settle()
        for client in list(self.waiting):
            if client.task.done():
                self.waiting.remove(client)
                if client.task.exception() is None:
                    self.inside.append(client)
                else:
                    # Too long, and no shorter than was promised.
                    assert isinstance(client.task.exception(), Paused)
                    assert self.world.clock.now - client.since >= 120
        # Those let in together entered in the order of their coming.
        order = [reader.request_id for reader in self.world.coordinator._core.lock.readers()]
        self.inside.sort(key=lambda client: order.index(client.name))
        self._judge()

    def _judge(self) -> None:
        if not self.operation:
            return
        status = self.world.coordinator.operation(self.operation)
        if not status.state.terminal:
            return
        self.operation = ""
        if self.mode is TrafficMode.OVERLAP:
            # Only leases have closed the door meanwhile.
            assert self.world.state.gate.closures == self.closures
            assert status.pause_seconds is None
        if status.state is SwapState.SERVING:
            assert status.error is None
            return
        # A swap is given up for what is inside, or because somebody said so; never because somebody had paused.
        assert status.state is SwapState.ABORTED
        assert status.error is not None
        assert status.error.code in (DrainTimeout.code, "Cancelled")

    async def _act(self, act) -> None:
        act()
        await self._settle()

    async def _close(self, client: Client) -> None:
        await client.stack.aclose()
        await client.stack.aclose()  # a second time nothing is left to give back
        await self._settle()

    def teardown(self):
        async def end():
            for client in [*self.waiting, *self.inside]:
                client.task.cancel()
                await asyncio.gather(client.task, return_exceptions=True)
                await client.stack.aclose()
            await self.world.clock.advance(1000)
            state = self.world.state
            assert (state.gate.open, state.gate.queued, state.lock.readers, state.lock.writer) == (True, 0, 0, "")
            assert state.gate.holders == []
            await self.world.stop()

        if hasattr(self, "world"):
            self.run(end())
        self.runner.close()
        self.folder.cleanup()


TestDoor = Door.TestCase
TestDoor.settings = settings(
    max_examples=examples(30),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
