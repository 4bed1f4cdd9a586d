"""Canaries under whatever users and fate do: a version spreads only after what it had to show was seen.

What the pods have shown is followed here a second time, in the test's own way: from what each of them served and
answered between the looks that the operator had at them.
"""

from datetime import datetime, timedelta

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from modelswap_engine.protocol.assignment import Assignment
from modelswap_operator.api.modelversion import Canary, OnFailure
from modelswap_operator.planning.actions import StartSwaps, Wait, WriteAssignment
from modelswap_operator.planning.changes import ChangePolicy
from tests.property.test_slot_rollouts import Rollouts
from tests.support.examples import examples
from tests.support.sim_pod import CATALOG, GOOD, SimPod
from tests.support.slot_fate import PICK
from tests.support.slot_world import World

Seen = tuple[str, int, datetime, int, int]
"""What a pod served when it was first seen to do so under a boot: digest, boot, when, good and failed answers."""


def counts(pod: SimPod, digest: str) -> tuple[int, int]:
    assert pod.answers is not None
    return pod.answers.get(digest, (0, 0))


class Canaries(Rollouts):
    """The same life as without a canary, with clients that ask, and engines that fail them."""

    @initialize(
        pods=st.integers(1, 5),
        budget=st.sampled_from([1, "100%", 2, "50%"]),
        on_failure=st.sampled_from(list(OnFailure)),
        size=st.integers(1, 3),
        soak=st.sampled_from([30, 3, 0]),
        requests=st.sampled_from([0, 4]),
        percent=st.sampled_from([0, 25]),
        protocol=st.sampled_from([1, 2]),
    )
    def begin(  # type: ignore[override]
        self,
        pods: int,
        budget: int | str,
        on_failure: OnFailure,
        size: int,
        soak: int,
        requests: int,
        percent: int,
        protocol: int,
    ) -> None:
        canary = Canary(pods=size, soak_seconds=soak, min_requests=requests, max_error_percent=percent)
        self.world = World(pods=pods, max_unavailable=budget, on_failure=on_failure, canary=canary, protocol=protocol)
        self.refused: set[tuple[int, str]] = set()
        self.seen: dict[str, Seen] = {}
        self.before: Assignment | None = None
        self.world.settle()
        self.world.bump("1.1")
        self.work(times=12)

    def _canary_pods(self) -> list[SimPod]:
        """Pods that serve what they were named for."""
        candidate = self.world.assignment.candidate if self.world.assignment is not None else None
        if candidate is None:
            return []
        return [p for p in self.world.pods if p.uid in candidate.pod_uids and p.live == CATALOG[candidate.version]]

    @precondition(lambda self: self._canary_pods())
    @rule(ok=st.sampled_from([0, 1, 4]), failed=st.sampled_from([0, 1]), seconds=st.sampled_from([1, 40]))
    def ask_a_canary(self, ok: int, failed: int, seconds: int) -> None:
        self._canary_pods()[0].answer(ok=ok, failed=failed)
        self.world.now += timedelta(seconds=seconds)
        self.work(times=4)

    @precondition(lambda self: any(p.live is not None for p in self.world.pods))
    @rule(pick=PICK, ok=st.integers(0, 4), failed=st.sampled_from([0, 0, 0, 1]))
    def clients_ask(self, pick: int, ok: int, failed: int) -> None:
        serving = [p for p in self.world.pods if p.live is not None]
        serving[pick % len(serving)].answer(ok=ok, failed=failed)

    @rule(seconds=st.sampled_from([1, 5, 40]))
    def time_goes_by(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

    def _unavailable(self) -> set[str]:
        """Called before each pass: this is what the operator is about to see."""
        self.before = self.world.assignment
        for pod in self.world.pods:
            if pod.live is None or not pod.reachable:
                continue
            known = self.seen.get(pod.uid)
            if known is None or known[:2] != (pod.live.digest, pod.boot):
                self.seen[pod.uid] = (pod.live.digest, pod.boot, self.world.now, *counts(pod, pod.live.digest))
        return super()._unavailable()

    def _check(self, action: object, before: set[str]) -> None:
        super()._check(action, before)
        if isinstance(action, WriteAssignment):
            self._check_decision(action.assignment)
        if isinstance(action, StartSwaps) and self.before is not None and self.before.candidate is not None:
            named = self.before.candidate
            for order in (order for order in action.orders if order.request.hold is None):
                assert order.pod.uid in named.pod_uids or order.request.target.digest != named.digest

    def _check_decision(self, new: Assignment) -> None:
        old, world = self.before, self.world
        candidate = old.candidate if old is not None else None
        if candidate is None:
            return
        if new.candidate is not None and new.candidate.digest == candidate.digest:
            for uid in set(candidate.pod_uids) - set(new.candidate.pod_uids):
                lost = next((p for p in world.pods if p.uid == uid), None)
                smaller = len(new.candidate.pod_uids) >= min(world.spec.rollout.canary.pods, len(world.pods))
                assert lost is None or (lost.ready and not lost.reachable) or smaller, "a canary pod lost its place"
        back = world.status.stable is not None and world.status.stable.digest == candidate.digest
        if new.stable is not None and new.stable.digest == candidate.digest and not back:
            self._check_shown(candidate.pod_uids, candidate.digest)

    def _check_shown(self, uids: list[str], digest: str) -> None:
        world, wanted = self.world, self.world.spec.rollout.canary
        pods = [p for p in world.pods if p.uid in uids]
        assert len(pods) >= min(wanted.pods, sum(p.uid in world.ever_ready for p in world.pods))
        answered = failed = 0
        for pod in pods:
            served, boot, since, good, bad = self.seen[pod.uid]
            assert pod.live is not None
            assert (served, boot) == (pod.live.digest, pod.boot) == (digest, boot)
            assert world.now >= since + timedelta(seconds=wanted.soak_seconds), "it spread before the soak was over"
            answered += counts(pod, digest)[0] - good
            failed += counts(pod, digest)[1] - bad
        assert answered + failed >= wanted.min_requests, "it spread before it was asked often enough"
        assert failed * 100 <= wanted.max_error_percent * (answered + failed), (
            "it spread although it failed its clients"
        )

    def teardown(self) -> None:
        """Fate relents and clients come: all serve the version, or, where it was refused, one that was good before."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for pod in world.pods:
            pod.reachable, pod.ready = True, pod.live is not None
            pod.transient_faults, pod.goes_silent, pod.too_small, pod.visits = 0, False, False, 1
        world.policy = ChangePolicy()
        world.edit(suspend=False)
        for _ in range(3000):
            action = world.run_pass()
            if isinstance(action, Wait):
                busy = any(p.busy or p.live is None for p in world.pods)
                if not busy and action.until is None:
                    break
                world.tick()
                world.now = max(world.now, action.until or world.now)
        else:
            raise AssertionError("never settled")
        served = set(world.serving())
        failed = any(f.generation == world.generation for f in world.status.failures)
        assert served <= set(GOOD) or world.spec.rollout.on_failure is OnFailure.HALT
        if not failed and world.spec.version in GOOD:
            assert served == ({world.spec.version} if world.pods else set())
            assert world.condition("Stalled") is None
        elif failed:
            assert world.condition("Stalled") is not None
            if world.spec.rollout.on_failure is OnFailure.ROLLBACK and world.assignment is not None:
                assert len(served) <= 1


TestCanaries = Canaries.TestCase
TestCanaries.settings = settings(
    max_examples=examples(40), stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
