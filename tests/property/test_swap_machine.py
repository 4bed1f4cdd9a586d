"""Random lives of one pod: swaps, faults, cancels, deaths and crashes in any order, against a small model.

Whatever happens, the live bytes are those of exactly one version, the one that everything says is live; an operation's
end agrees with them; the gate is open unless nobody can be served; nothing stays behind.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelswap_engine.protocol.errors import Busy, ModelswapError, NotFound, NotReady, StaleRevision
from modelswap_engine.protocol.holding import Hold
from modelswap_engine.protocol.messages import (
    CancelRequest,
    CheckRequest,
    Fence,
    HoldRequest,
    ProceedRequest,
    RollbackRequest,
)
from modelswap_engine.protocol.policy import Checks, Loading, LoadingMode, OnTimeout, PromptCheck, Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.support.examples import examples
from tests.support.fake_backend import Fault
from tests.support.swapping import OWNER, POD, World, checkpoint, request

STEPS = [
    "stage", "try_out", "prepare", "pause", "commit", "verify", "try_live", "resume", "rollback", "retire", "release",
    "load", "hashes",
]  # fmt: skip
TRIED = Checks(prompts=[PromptCheck(prompt="hello")])
FAULTS = [Fault.ERROR, Fault.LATE_ERROR, Fault.RAISE, Fault.DIE, Fault.DIE_AFTER, Fault.HANG]
CONTENTS = {
    "1.0": checkpoint(),
    "1.1": checkpoint(q=b"QQQQ"),
    "1.2": checkpoint(embed=b"E" * 8, norm=b"NN"),
    "1.3": checkpoint(q=b"1234", k=b"5678", norm=b"--"),
}
# Few seconds, so that a hanging call costs few turns of the supervisor.
BOUNDS = {
    "call_seconds": 5.0,
    "pause_seconds": 5.0,
    "admit_seconds": 3.0,
    "reclaim_seconds": 4.0,
    "stage_seconds": 20.0,
    "load_seconds": 20.0,
    "hash_seconds": 20.0,
    "probe_seconds": 3.0,
}

faults = st.dictionaries(st.sampled_from(STEPS), st.sampled_from(FAULTS), max_size=2)
versions = st.sampled_from(sorted(CONTENTS))
traffics = st.builds(
    Traffic,
    mode=st.sampled_from(list(TrafficMode)),
    timeout_seconds=st.sampled_from([0.0, 5.0]),
    on_timeout=st.sampled_from(list(OnTimeout)),
    peers_ready=st.sampled_from([0, 0, 1]),
)
loadings = st.builds(Loading, mode=st.sampled_from(list(LoadingMode)), keep_previous=st.booleans())
moments = st.integers(0, 60)


class Pod(RuleBasedStateMachine):
    """One pod on fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.numbers = iter(range(1, 10_000))
        self.answers = {}
        self.clients = []
        self.release_failed = False

    def run(self, work):
        return self.runner.run(work)

    @initialize(fault=faults, tries_live=st.booleans())
    def start(self, fault, tries_live):
        async def begin():
            self.world = World(Path(self.folder.name), **BOUNDS)
            self.world.backend.tries_live = tries_live
            self.targets = {name: self.world.publish(name, content) for name, content in CONTENTS.items()}
            self.world.backend.faults |= {step: what for step, what in fault.items() if step == "load"}
            await self.world.start()

        self.run(begin())

    @rule(version=versions, fault=faults, traffic=traffics, loading=loadings)
    def swap(self, version, fault, traffic, loading):
        # A version that the engine would not let go of stays until the next commit or load; the figures show it.
        self.release_failed |= "release" in fault
        self.world.backend.faults |= fault
        self.run(self._swap(version, traffic, loading))
        self.world.backend.faults.clear()

    @rule(version=versions, fault=faults, traffic=traffics, moment=moments)
    def swap_and_cancel(self, version, fault, traffic, moment):
        accepted = []

        async def cancel(operation_id):
            await self._ticks(moment)
            try:
                answer = await self.world.coordinator.cancel(
                    operation_id, CancelRequest(fence=self._fence(0, owner="cli"))
                )
            except Busy:
                return
            accepted.extend([] if answer.state.terminal else [operation_id])

        self.world.backend.faults |= fault
        self.run(self._swap(version, traffic, Loading(), meanwhile=cancel))
        # A cancel that was not refused is kept.
        assert all(self.answers[operation_id].state is SwapState.ABORTED for operation_id in accepted)
        self.world.backend.faults.clear()

    @rule(version=versions, traffic=traffics, moment=moments)
    def swap_and_lose_a_worker(self, version, traffic, moment):
        async def kill(_):
            await self._ticks(moment)
            self.world.backend.kill()

        self.run(self._swap(version, traffic, Loading(), meanwhile=kill))

    @rule(version=versions, fault=faults, traffic=traffics, moment=moments, survives=st.booleans())
    def swap_and_crash(self, version, fault, traffic, moment, survives):
        async def life():
            world, operation_id, revision = self.world, self._next(), next(self.numbers)
            target, before = self.targets[version], world.coordinator.state().live
            wanted = request(target, operation_id, traffic=traffic, revision=revision)
            await world.coordinator.swap(wanted)
            await self._ticks(moment)
            answer = world.coordinator.operation(operation_id)
            await self._restart(survives)
            if answer.state.terminal and world.journal.state.outcome(operation_id) is not None:
                assert world.coordinator.operation(operation_id) == answer
            live = world.state.live
            if live is not None:
                status = world.coordinator.operation(operation_id)
                if status.state.succeeded:
                    assert live.digest == target.digest
                elif before is not None:
                    assert live.digest == before.digest
                self.answers[operation_id] = status

        self.world.backend.faults |= fault
        self.run(life())
        self.world.backend.faults.clear()

    @rule(
        version=versions,
        fault=faults,
        traffic=traffics,
        moment=moments,
        fate=st.sampled_from(["proceed", "proceed-twice", "cancel", "expire", "renew", "kill", "crash"]),
        patience=st.sampled_from([0.0, 7.0, 40.0]),
    )
    def swap_that_waits(self, version, fault, traffic, moment, fate, patience):
        """Staged beside what serves; whatever comes to it then, it goes on only when it is told to."""
        self.release_failed |= "release" in fault
        self.world.backend.faults |= fault
        self.run(self._wait(version, traffic, moment, fate, patience))
        self.world.backend.faults.clear()

    async def _wait(self, version, traffic, moment, fate, patience):
        world, operation_id, revision = self.world, self._next(), next(self.numbers)
        target, before = self.targets[version], world.state.live
        wanted = request(target, operation_id, traffic=traffic, revision=revision, hold=Hold(seconds=30))
        try:
            await world.coordinator.swap(wanted)
        except NotReady:
            assert before is None
            return
        await self._ticks(moment)
        if patience:
            await world.clock.advance(patience)
        commits = world.backend.steps.count("commit")
        assert world.state.live == before or world.state.live is None, "it went on by itself"
        if fate == "crash":
            await self._restart(False)
            assert before is None or world.state.live is None or world.state.live == before
            return
        if fate == "cancel":
            await world.coordinator.cancel(operation_id, CancelRequest(fence=self._fence(0, owner="cli")))
        elif fate == "kill":
            world.backend.kill()
        elif fate == "renew":
            await world.coordinator.hold(operation_id, HoldRequest(fence=self._fence(revision), seconds=30))
        elif fate.startswith("proceed"):
            decided = next(self.numbers)
            for _ in range(1 + (fate == "proceed-twice")):
                order = ProceedRequest(fence=self._fence(decided), peers_ready=traffic.peers_ready)
                await world.coordinator.proceed(operation_id, order)
        status = await world.ended(operation_id)
        if not fate.startswith("proceed"):
            assert not status.state.succeeded
            assert world.backend.steps.count("commit") == commits
        self._judge(operation_id, status, before, target)

    @rule(survives=st.booleans())
    def crash(self, survives):
        async def life():
            before = self.world.state
            await self._restart(survives)
            after = self.world.state
            if before.live is not None and after.live is not None:
                assert after.live == before.live

        self.run(life())

    @rule()
    def lose_a_worker(self):
        async def life():
            before = self.world.state.live
            self.world.backend.kill()
            await self.world.clock.advance(3)
            assert before is None or self.world.state.live == before

        self.run(life())

    @rule(fault=st.sampled_from(FAULTS))
    def lose_a_worker_that_does_not_come_back_at_once(self, fault):
        async def life():
            before = self.world.state.live
            self.world.backend.kill()
            self.world.backend.faults["load"] = fault
            for _ in range(20):
                await self.world.clock.advance(10)
            self.world.backend.faults.clear()
            if before is not None:
                assert self.world.state.live.digest == before.digest

        self.run(life())

    @rule(
        names=st.sets(st.sampled_from(["embed", "q", "k", "norm"]), min_size=1),
        fault=faults,
        swap=st.none() | st.tuples(versions, traffics, loadings),
    )
    def a_live_tensor_changes_by_itself(self, names, fault, swap):
        async def life():
            world, before = self.world, self.world.state.live
            if before is None:
                return
            for client in self.clients:  # one that stays in admission keeps every swap from coming about
                await client.aclose()
            self.clients.clear()
            for name in names:
                world.backend.live[name] = b"?" * len(world.backend.live[name])
            world.backend.faults |= {step: what for step, what in fault.items() if step != "hashes"}
            loads = world.backend.steps.count("load")
            found = await world.clock.run(world.coordinator.check(CheckRequest()))
            # Nothing is found only where an audit hung before, and the engine was loaded anew.
            assert {item.name for item in found.mismatched} == names or world.backend.steps.count("load") > loads
            if swap is not None:
                with suppress(Busy):  # the repair is past the point where it gives way
                    await self._swap(*swap)
            for _ in range(12):
                await world.clock.advance(5)
            assert world.state.drifted == []
            assert swap is not None or world.state.live is None or world.state.live == before

        self.release_failed |= "release" in fault
        self.run(life())
        self.world.backend.faults.clear()

    @rule(fault=faults)
    def roll_back(self, fault):
        async def life():
            world, operation_id = self.world, self._next()
            before, previous = world.state.live, world.state.previous
            call = RollbackRequest(operation_id=operation_id, fence=self._fence(next(self.numbers)))
            if previous is None:
                try:
                    await world.coordinator.rollback(call)
                    raise AssertionError("rolled back to nothing")
                except NotFound:
                    return
            await world.coordinator.rollback(call)
            self._judge(operation_id, await world.ended(operation_id), before, previous)

        self.world.backend.faults |= fault
        self.run(life())
        self.world.backend.faults.clear()

    @precondition(lambda self: len(self.clients) < 3)
    @rule(submitted=st.booleans())
    def a_request_arrives(self, submitted):
        async def arrive():
            stack = AsyncExitStack()
            try:
                admission = await self.world.clock.run(stack.enter_async_context(self.world.coordinator.admission()))
            except ModelswapError:
                assert not self.world.coordinator.ready()
                return
            assert admission.live == self.world.state.live
            if submitted:
                admission.submitted()
            self.clients.append(stack)

        self.run(arrive())

    @precondition(lambda self: self.clients)
    @rule()
    def requests_end(self):
        async def end():
            for client in self.clients:
                await client.aclose()
            self.clients.clear()

        self.run(end())

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), version=versions)
    def the_same_id_gets_the_same_answer(self, data, version):
        operation_id = data.draw(st.sampled_from(sorted(self.answers)))
        status = self.run(self.world.coordinator.swap(request(self.targets[version], operation_id, revision=0)))
        assert status == self.answers[operation_id]

    @rule(version=versions)
    def a_stale_call_is_refused(self, version):
        async def call():
            accepted = self.world.journal.state.accepted
            if accepted is None or accepted.revision == 0:
                return
            steps = list(self.world.backend.steps)
            try:
                await self.world.coordinator.swap(
                    request(self.targets[version], self._next(), revision=accepted.revision - 1)
                )
                raise AssertionError("a stale call was accepted")
            except StaleRevision:
                assert self.world.backend.steps == steps

        self.run(call())

    @invariant()
    def everything_agrees(self):
        if not hasattr(self, "world"):
            return
        self.run(self._settled())
        world, state = self.world, self.world.state
        assert world.backend.violations == []
        assert world.coordinator._core.lock.claimed is False
        assert state.gate.in_flight == len(self.clients)
        assert world.backend.paused == ""
        assert world.backend.second == ""
        assert world.coordinator._core.retiring is None
        if state.live is None:
            assert not state.ready
            assert not state.gate.open
            assert state.reason in ("Quarantined", "LoadFailed", "Starting")
            return
        assert state.ready, (state.reason, state.message)
        assert state.gate.open
        assert not state.quarantined
        assert world.holds(self.targets[state.live.version])
        assert world.backend.digest == state.live.digest
        assert world.listener.active == state.live
        assert world.backend.staged is None
        held = {v.digest for v in (state.live, state.previous) if v is not None}
        assert held <= world.listener.prepared
        if state.previous is not None:
            assert world.backend.previous is not None
            assert world.backend.previous[0] == state.previous.digest
        else:
            self.release_failed = self.release_failed and world.backend.previous is not None
            assert world.backend.previous is None or self.release_failed

    def teardown(self):
        async def end():
            await self.world.stop()

        if hasattr(self, "world"):
            self.run(end())
        self.runner.close()
        self.folder.cleanup()

    async def _swap(self, version, traffic, loading, *, meanwhile=None):
        world, operation_id = self.world, self._next()
        target, before = self.targets[version], world.state.live
        revision = next(self.numbers)
        refused = world.backend.tries_live and traffic.mode not in (TrafficMode.DRAIN, TrafficMode.ABORT)
        checks = Checks() if refused else TRIED
        wanted = request(target, operation_id, traffic=traffic, loading=loading, checks=checks, revision=revision)
        await world.coordinator.swap(wanted)
        if meanwhile is not None:
            await meanwhile(operation_id)
        self._judge(operation_id, await world.ended(operation_id), before, target)

    def _judge(self, operation_id, status, before, target):
        self.answers[operation_id] = status
        live = self.world.state.live
        if status.state is SwapState.SERVING:
            assert status.error is None
            assert live is None or live == target  # None: the worker died right after
        elif status.state is SwapState.QUARANTINED:
            assert live is None
        else:
            assert status.error is not None
            assert live is None or before is None or live == before

    async def _settled(self):
        """Let the audit and the supervisor come to rest; a worker that died often is started again after a pause."""
        await self.world.clock.settle()
        if self.world.state.live is not None:
            await self.world.clock.advance(2)
        longest = self.world.coordinator._core.settings.retry_seconds[1]
        if self.world.state.live is not None and not self.world.state.ready:
            await self.world.clock.advance(longest + 2)

    async def _restart(self, survives):
        for client in self.clients:
            await client.aclose()
        self.clients.clear()
        await self.world.crash(engine_survives=survives)
        await self.world.start()

    async def _ticks(self, number):
        for _ in range(number):
            await asyncio.sleep(0)

    def _next(self):
        return f"op-{next(self.numbers)}"

    def _fence(self, revision, owner=OWNER):
        return Fence(pod_uid=POD, owner_uid=owner, epoch=1, revision=revision)


TestPod = Pod.TestCase
TestPod.settings = settings(
    max_examples=examples(25),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
