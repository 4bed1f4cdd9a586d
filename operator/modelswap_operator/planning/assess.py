"""What a snapshot means: who counts, what is wanted, what has failed. Shared by the planner and the status summary."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from modelswap_engine.protocol.assignment import AssignmentCandidate, AssignmentTarget, WeightsPolicy
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.policy import Verification
from modelswap_engine.protocol.version import VERIFIES_SINCE
from modelswap_operator.api.modelversion import Failure, ModelVersionSpec, OnFailure
from modelswap_operator.planning.changes import Hold
from modelswap_operator.planning.snapshot import PlanKey, PlanResult, Pod, Snapshot


def proved(state: EngineState | None, digest: str) -> bool:
    """Say whether every rank of an engine has proved ``digest`` under its current boot id."""
    if state is None or state.quarantined or state.live is None or not state.boot_id or not digest:
        return False
    ranks = state.ranks
    return (
        state.live.digest == digest
        and bool(ranks)
        and all(rank.alive and rank.boot_id and rank.digest == digest for rank in ranks)
    )


def running(pod: Pod) -> SwapStatus | None:
    """Return the operation a pod is working on, if any."""
    operation = pod.state.operation if pod.state is not None else None
    return operation if operation is not None and not operation.state.terminal else None


def highest_epoch(snapshot: Snapshot) -> int:
    """Return the highest epoch under which the assignment or a pod has seen a decision."""
    epochs = [p.state.epoch for p in snapshot.pods if p.state is not None]
    return max([*epochs, snapshot.assignment.epoch if snapshot.assignment is not None else 0])


def followed(state: EngineState | None, digest: str) -> bool:
    """Say whether an engine has proved what it serves, and that is a trainer's change of the decided ``digest``."""
    if state is None or state.live is None or state.decided is None:
        return False
    return state.decided.digest == digest != "" and proved(state, state.live.digest)


def trusting(pod: Pod) -> bool:
    """Say whether a pod's sidecar is known to be too old to notice that something should be signed."""
    return pod.state is not None and pod.state.protocol_version < VERIFIES_SINCE


@dataclass(frozen=True)
class Assessment:
    """Facts derived from a snapshot of an object that exists and whose spec was read."""

    snapshot: Snapshot

    @property
    def spec(self) -> ModelVersionSpec:
        """Return the spec; an assessment of a slot without one is a defect of the caller."""
        if self.snapshot.spec is None:
            raise ValueError(f"slot {self.snapshot.slot}: there is no spec to assess")
        return self.snapshot.spec

    @cached_property
    def present(self) -> tuple[Pod, ...]:
        """Pods that are neither leaving nor finished, by name."""
        pods = (p for p in self.snapshot.pods if not p.terminating and not p.finished)
        return tuple(sorted(pods, key=lambda p: p.name))

    @cached_property
    def counted(self) -> tuple[Pod, ...]:
        """Pods that Ready speaks about: present, and Ready at some time under their UID."""
        return tuple(p for p in self.present if p.ever_ready)

    @cached_property
    def grouped(self) -> Pod | None:
        """A pod that is one of a group; while there is one nothing is changed in the slot."""
        return next((p for p in self.present if p.group), None)

    @property
    def owned(self) -> bool:
        """Say whether the assignment is this object's, and says what is stable."""
        current = self.snapshot.assignment
        if current is None or current.stable is None or current.released:
            return False
        return current.owner_uid == self.snapshot.uid

    @cached_property
    def target(self) -> AssignmentTarget | None:
        """The wanted version with its digest; None until a pod has resolved the source.

        What was resolved once for this object stays resolved (mutable sources are pinned by the first pod), and what
        is stable was taken under the policy of its time: another one is for the next version.
        """
        source, current = self.spec.source, self.snapshot.assignment
        for ref in self._known() if self.owned else ():
            if (ref.version, ref.uri) == (self.spec.version, source.uri) and source.digest in ("", ref.digest):
                stable = current is not None and ref is current.stable
                return self._target(ref.digest, ref.verification if stable else self.spec.verification.to_wire())
        found = [result.plan.to_digest for result in self.plans.values() if result.plan is not None]
        found += self._refused()
        digest = next((d for d in found if d and source.digest in ("", d)), "")
        return self._target(digest, self.spec.verification.to_wire()) if digest else None

    def _target(self, digest: str, verification: Verification | None) -> AssignmentTarget:
        source = self.spec.source
        return AssignmentTarget(
            version=self.spec.version,
            uri=source.uri,
            digest=digest,
            credentials=source.credentials,
            verification=verification,
        )

    def _refused(self) -> list[str]:
        """What the source was resolved to when it was refused; asking again would only hear it again."""
        shown, generation = self.snapshot.status.target, self.snapshot.generation
        failed = [f.digest for f in self.snapshot.status.failures if f.generation == generation]
        return [d for d in failed if shown is not None and (shown.version, shown.digest) == (self.spec.version, d)]

    def _known(self) -> Iterator[AssignmentTarget]:
        current = self.snapshot.assignment
        refs = (current.stable, current.candidate) if current is not None else ()
        return (ref for ref in (*refs, self.snapshot.ledger.previous) if ref is not None and ref.digest)

    @cached_property
    def plans(self) -> dict[PlanKey, PlanResult]:
        """What pods have answered about the wanted source."""
        wanted = (self.spec.version, self.spec.source.uri, self.spec.source.digest)
        return {key: result for key, result in self.snapshot.memory.plans.items() if tuple(key[:3]) == wanted}

    @cached_property
    def target_digest(self) -> str:
        """Digest of the target, the pin where it is not resolved, or empty."""
        return self.target.digest if self.target is not None else self.spec.source.digest

    def failed(self, digest: str) -> Failure | None:
        """Return the content failure of a digest under this generation; an empty digest failed as a whole."""
        mine = (f for f in self.snapshot.status.failures if f.generation == self.snapshot.generation)
        return next((f for f in mine if f.digest == digest), None)

    @cached_property
    def failure(self) -> Failure | None:
        """The content failure of the target, recorded in status."""
        found = self.failed(self.target_digest)
        return found or (self.failed("") if self.target_digest else None)

    @property
    def halted(self) -> bool:
        """Say whether the target has failed and every pod is to stay as it is."""
        return self.failure is not None and self.spec.rollout.on_failure is OnFailure.HALT

    @property
    def completed_before(self) -> bool:
        """Say whether every counted pod served the target once: one pod's later fault then moves no other."""
        stable = self.snapshot.status.stable
        return stable is not None and stable.digest == self.target_digest != ""

    def held(self, now: datetime) -> Hold | None:
        """Return why the version may not spread now; what every pod served before, and the way back, always may."""
        at_rest = self.failure is not None or self.completed_before
        if at_rest or self.snapshot.asked.change_now == str(self.snapshot.generation):
            return None
        return self.snapshot.policy.hold(now)

    @cached_property
    def stable_digest(self) -> str:
        """Digest of the assignment's stable version, or empty."""
        current = self.snapshot.assignment
        return current.stable.digest if current is not None and current.stable is not None else ""

    @cached_property
    def candidate(self) -> AssignmentCandidate | None:
        """The assignment's candidate while it is what the spec wants and has not failed."""
        current = self.snapshot.assignment
        if current is None or current.candidate is None or not self.owned or self.failure is not None:
            return None
        return current.candidate if self.target is not None and current.candidate.digest == self.target.digest else None

    def desired(self, pod: Pod) -> AssignmentTarget | None:
        """Return what a pod is to be brought to now, or None when it is to be left alone.

        While a candidate is being proved the other pods stay where they are: bringing leftovers of a superseded
        rollout to the stable version first would swap them twice.
        """
        current = self.snapshot.assignment
        if current is None or not self.owned or current.stable is None or self.halted:
            return None
        if self.failure is not None or (self.target is not None and current.stable.digest == self.target.digest):
            wanted: AssignmentTarget | None = current.stable
        elif self.target is not None and current.candidate is not None:
            named = current.candidate.digest == self.target.digest and pod.uid in current.candidate.pod_uids
            wanted = current.candidate if named else None
        else:
            wanted = None
        return None if wanted is None or self.failed(wanted.digest) else wanted

    @cached_property
    def on_target(self) -> tuple[Pod, ...]:
        """Counted pods that have proved the target."""
        if self.target is None:
            return ()
        return tuple(p for p in self.counted if self.there(p, self.target_digest))

    def there(self, pod: Pod, digest: str) -> bool:
        """Say whether a pod serves ``digest``; where weights are External, also whatever a trainer made of it."""
        return proved(pod.state, digest) or (self.external and followed(pod.state, digest))

    @property
    def external(self) -> bool:
        """Say whether weights are a trainer's to change: then what pods serve is reported, and never put right."""
        return self.spec.weights is WeightsPolicy.EXTERNAL

    @cached_property
    def done(self) -> bool:
        """Say whether the slot is where the spec wants it, as read back from every counted pod."""
        return (
            self.owned
            and self.target is not None
            and self.stable_digest == self.target.digest
            and self.snapshot.assignment is not None
            and self.snapshot.assignment.candidate is None
            and bool(self.counted)
            and len(self.on_target) == len(self.counted)
        )

    @cached_property
    def vacant(self) -> bool:
        """Say whether the slot has had pods and has none now, not even ones that are leaving."""
        return self.owned and all(p.finished for p in self.snapshot.pods)

    @cached_property
    def scaled_to_zero(self) -> bool:
        """Say whether no pod is to be expected: the slot is at rest without any.

        In the middle of a rollout a moment without pods proves nothing; only that none comes for a while does.
        """
        progress = self.snapshot.memory.progress
        return self.vacant and (self.decided or (progress is not None and progress.at_zero))

    @property
    def decided(self) -> bool:
        """Say whether the wanted version is what pods start on."""
        return self.target is not None and self.stable_digest == self.target.digest
