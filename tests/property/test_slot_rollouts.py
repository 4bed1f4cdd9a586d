"""Whatever users and fate do to a slot, its rules hold at every step and it ends where it should."""

from datetime import timedelta
from itertools import pairwise

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.policy import TrafficMode
from modelswap_operator.api.modelversion import OnFailure
from modelswap_operator.planning.actions import CancelSwaps, RecordFailure, StartSwaps, Wait, WriteAssignment
from modelswap_operator.planning.changes import ChangePolicy
from modelswap_operator.planning.rollout import allowed
from modelswap_operator.planning.watching import EVERY
from tests.support import sim_pod
from tests.support.sim_pod import BAD, CATALOG, GOOD
from tests.support.slot_fate import PICK, SlotFate
from tests.support.slot_world import World

AWAY = ErrorBody(code="SourceUnreadable", message="503", retryable=True)
MUTATIONS = (WriteAssignment, StartSwaps, CancelSwaps)


class Rollouts(SlotFate):
    """Users edit, pods fail and die, the operator is killed; between all that it makes passes."""

    @initialize(
        pods=st.integers(1, 5),
        budget=st.sampled_from([1, "100%", 2, "50%"]),
        on_failure=st.sampled_from(list(OnFailure)),
        pinned=st.booleans(),
        serving=st.sampled_from(["1.0", "1.1"]),
        protocol=st.sampled_from([1, 2, 3]),
    )
    def begin(
        self, pods: int, budget: int | str, on_failure: OnFailure, pinned: bool, serving: str, protocol: int
    ) -> None:
        self.world = World(
            pods=pods,
            max_unavailable=budget,
            on_failure=on_failure,
            pinned=pinned,
            serving=serving,
            version="1.0",
            protocol=protocol,
        )
        self.refused: set[tuple[int, str]] = set()

    # The operator

    @rule(times=st.sampled_from([1, 2, 4, 12, 16]))
    def work(self, times: int) -> None:
        for _ in range(times):
            before = self._unavailable()
            action = self.world.run_pass()
            if isinstance(action, RecordFailure):
                self.refused.add((action.failure.generation, action.failure.digest))
            self._check(action, before)
            if isinstance(action, Wait):
                self.world.tick()

    def _unavailable(self) -> set[str]:
        return {p.uid for p in self.world.pods if not p.ready or p.disturbed or p.quarantined}

    def _check(self, action: object, before: set[str]) -> None:
        world = self.world
        if world.spec.suspend:
            assert not isinstance(action, MUTATIONS) or self._only_given_back(action), "a suspended slot was changed"
        if not isinstance(action, StartSwaps):
            return
        if action.orders[0].request.hold is not None:
            self._check_staging(action)
            return
        taken = {o.pod.uid for o in action.orders} - before
        counted = [p for p in world.pods if p.uid in world.ever_ready]
        if taken:
            assert len(before & {p.uid for p in counted}) + len(taken) <= allowed(
                world.spec.rollout.max_unavailable, len(counted)
            ), "more pods unavailable than allowed"
        self._check_spread(action)
        for order in action.orders:
            assert (world.generation, order.request.target.digest) not in self.refused, "a refused digest was retried"

    def _only_given_back(self, action: object) -> bool:
        """Say whether pods were only told to drop what they hold staged."""
        asked = {o.pod.uid for o in action.orders} if isinstance(action, CancelSwaps) else set()
        operations = [p.operation for p in self.world.pods if p.uid in asked]
        return bool(asked) and all(o is not None and o.hold is not None for o in operations)

    def _check_spread(self, action: StartSwaps) -> None:
        """A version that not every pod has served yet spreads in waves, and not at all while changes are frozen."""
        world, target = self.world, action.orders[0].request.target
        stable = world.status.stable
        failed = any(f.generation == world.generation for f in world.status.failures)
        if failed or (stable is not None and stable.digest == target.digest):
            return
        assert not world.policy.frozen, "a version spread although changes are frozen"
        busy = sum(p.disturbed and p.reachable and p.uid in world.ever_ready for p in world.pods)
        there = sum(p.live is not None and p.live.digest == target.digest for p in world.pods)
        assert busy <= there + 1, "more pods at once than have proved the version"

    def _check_staging(self, action: StartSwaps) -> None:
        """Pods stage in waves, before any of them is named to serve the version, and only while it may spread."""
        world, digest = self.world, action.orders[0].request.target.digest
        assert all(o.request.hold is not None for o in action.orders)
        assert world.spec.rollout.stage_ahead
        assert not world.policy.frozen
        assert (world.generation, digest) not in self.refused, "a refused digest was staged"
        assert world.assignment is not None
        assert world.assignment.candidate is not None
        assert (world.assignment.candidate.digest, world.assignment.candidate.pod_uids) == (digest, [])
        mine = [p for p in world.pods if p.operation is not None and p.operation.target.digest == digest]
        staging = [p for p in mine if p.busy and not p.held and p.reachable and p.uid in world.ever_ready]
        there = sum(p.live is not None and p.live.digest == digest for p in world.pods)
        assert len(staging) <= 1 + there + sum(p.held for p in mine), "more pods at once than have staged it"

    # Users

    @rule()
    def stage_ahead_or_not(self) -> None:
        rollout = self.world.spec.rollout
        self.world.edit(rollout=msgspec.structs.replace(rollout, stage_ahead=not rollout.stage_ahead))

    @rule(mode=st.sampled_from([TrafficMode.DRAIN, TrafficMode.ABORT]))
    def another_traffic_mode(self, mode: TrafficMode) -> None:
        self.world.edit(traffic=msgspec.structs.replace(self.world.spec.traffic, mode=mode))

    @rule()
    def freeze_or_not(self) -> None:
        self.world.policy = ChangePolicy(frozen=not self.world.policy.frozen)

    @rule(version=st.sampled_from(sorted(CATALOG)))
    def bump(self, version: str) -> None:
        self.world.bump(version)

    @rule(version=st.sampled_from(sorted(GOOD)), moved=st.sampled_from(["", sim_pod.digest("9"), AWAY]))
    def overwrite_a_source(self, version: str, moved: str | ErrorBody) -> None:
        self.world.moved[GOOD[version].uri] = moved

    @rule(version=st.sampled_from(sorted(GOOD)))
    def write_the_same_again(self, version: str) -> None:
        self.world.write_again(GOOD[version].uri)

    @rule(times=st.integers(1, 99))
    def ask_again(self, times: int) -> None:
        self.world.requested_at = str(times)

    # Fate

    @precondition(lambda self: any(p.busy and p.ready and p.reachable for p in self.world.pods))
    @rule()
    def cut_off_in_mid_swap(self) -> None:
        next(p for p in self.world.pods if p.busy and p.ready and p.reachable).reachable = False

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK)
    def lose_the_next_answer(self, pick: int) -> None:
        self._pod(pick).goes_silent = True

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK)
    def ready_or_not(self, pick: int) -> None:
        pod = self._pod(pick)
        pod.ready = not pod.ready and pod.live is not None

    @precondition(lambda self: len(self.world.pods) < 6)
    @rule(ready=st.booleans())
    def new_pod(self, ready: bool) -> None:
        stable = self.world.assignment.stable if self.world.assignment else None
        self.world.add_pod(None if stable else GOOD["1.0"], ready=ready)

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK, times=st.integers(1, 2))
    def trouble(self, pick: int, times: int) -> None:
        self._pod(pick).transient_faults += times

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK)
    def little_memory_or_not(self, pick: int) -> None:
        pod = self._pod(pick)
        pod.too_small = not pod.too_small

    @rule(seconds=st.sampled_from([20, 200, 400]))
    def nobody_looks_for_a_while(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

    # What always holds

    @invariant()
    def revisions_rise(self) -> None:
        revisions = self.world.revisions
        assert revisions == sorted(set(revisions))

    @invariant()
    def ready_means_read_back(self) -> None:
        world = self.world
        if world.condition("Ready") != ("True", "Succeeded") or not world.log:
            return
        conditions = {c.type: c for c in world.status.conditions}
        if conditions["Ready"].observed_generation != world.generation:
            return
        counts = world.status.pod_counts
        assert counts is not None
        assert counts.ready == counts.counted > 0
        assert world.condition("Stalled") is None
        assert world.condition("Reconciling") is None

    @invariant()
    def a_source_is_only_looked_at(self) -> None:
        """What a pod saw there changes nothing but what is said, and that is about the version that is wanted."""
        said = self.world.condition("SourceDrifted")
        target = self.world.status.target
        if said is not None and target is not None:
            assert said == ("True", "SourceDrifted")
            assert target.resolved_uri in next(
                c.message for c in self.world.status.conditions if c.type == "SourceDrifted"
            )

    def teardown(self) -> None:
        """Fate relents: then the slot ends at its version, or, if that is refused, all at one good version."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if not world.pods:
            world.settle()
            self._at_zero()
            world.add_pod(None if world.assignment is not None else GOOD["1.0"])
        for pod in world.pods:
            pod.reachable = True
            pod.ready = pod.live is not None
            pod.transient_faults = 0
            pod.too_small = False
            pod.goes_silent = False
        world.policy = ChangePolicy()
        world.edit(suspend=False)
        world.requested_at = "at the end"
        world.settle(limit=3000)
        assert world.status.observed_generation == world.generation
        served = set(world.serving())
        if world.spec.version in GOOD:
            assert served == {world.spec.version}
            assert world.condition("Ready") == ("True", "Succeeded")
        else:
            assert world.condition("Stalled") is not None
            assert served <= set(GOOD)
            if world.spec.rollout.on_failure is OnFailure.ROLLBACK and world.assignment is not None:
                assert len(served) == 1
        assert not any(p.held for p in world.pods), "a settled slot holds memory"
        self._end_of_looks()
        writes = world.status_writes
        world.run_pass()
        world.run_pass()
        assert world.status_writes == writes, "a settled slot is written again"

    def _at_zero(self) -> None:
        """Nothing serves, so nothing is wrong: not for want of pods."""
        world = self.world
        stalled = world.condition("Stalled")
        owned = world.assignment is not None
        assert not owned or stalled is None or stalled[1] != "ProgressDeadlineExceeded"
        if owned and stalled is None and not world.spec.suspend and not world.policy.frozen:
            assert world.condition("Ready") == ("True", "ScaledToZero")
            assert world.status.observed_generation == world.generation

    def _end_of_looks(self) -> None:
        """At rest what is said is what the last answer was; a source that never answered says nothing."""
        world = self.world
        uri = world.spec.source.uri
        if world.protocol < 3 or world.spec.version not in GOOD or not world.pods:
            return
        world.moved[uri] = sim_pod.digest("9")
        world.now += 2 * EVERY
        world.settle()
        assert world.condition("SourceDrifted") == ("True", "SourceDrifted")
        world.moved[uri] = ""
        for pod in world.pods:
            pod.outdated = False
        world.now += 2 * EVERY
        world.settle()
        assert world.condition("SourceDrifted") is None
        self._end_of_a_suspicion(uri)

    def _end_of_a_suspicion(self, uri: str) -> None:
        """One pod that read the files since is enough, in whatever turn it is asked; it is told once at most."""
        world = self.world
        world.write_again(uri)
        world.pods[-1].outdated = False
        told = [False]
        for _ in range(2 * len(world.pods) + 1):
            world.now += 2 * EVERY
            world.settle()
            told.append(world.condition("SourceDrifted") is not None)
        assert sum(now and not before for before, now in pairwise(told)) <= 1, "it is told again and again"
        assert not told[-1]


assert not set(GOOD) & set(BAD)
TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
