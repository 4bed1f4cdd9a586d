"""What a process that starts must serve. Pure.

An assignment file may be late (the kubelet copies it with a delay) and the journal may be new (the volume was lost), so
the newer of the two by (epoch, revision) decides. Where nothing was ever assigned, the pod's template does.
"""

from dataclasses import dataclass

import msgspec

from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget
from modelswap_engine.protocol.errors import NotReady, Refused, from_body
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.fence import CLI, Accepted
from modelswap_engine.swap.records import JournalState


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The version to serve, and the decision it comes from when that was the assignment's."""

    target: VersionRef
    adopted: Accepted | None = None


def choose(*, journal: JournalState, assignment: Assignment | None, template: VersionRef, pod_uid: str) -> Choice:
    """Return what must be served."""
    target = _assigned(journal, assignment, pod_uid)
    if assignment is not None and target is not None and _newer(assignment, journal.accepted):
        adopted = Accepted(
            owner_uid=assignment.owner_uid,
            epoch=assignment.epoch,
            revision=assignment.revision,
            target=target,
            released=assignment.released,
            done=True,  # it is written down once the version is loaded
        )
        return Choice(target=target, adopted=adopted)
    return Choice(target=_journaled(journal, template) or template)


def _newer(assignment: Assignment, accepted: Accepted | None) -> bool:
    """Say whether the file decides: it is at least as new, or nobody's decision stands against it."""
    if accepted is None:
        return True
    if accepted.owner_uid in ("", CLI):
        return not assignment.released  # a person swapped before any object did, or after the last one was deleted
    return (assignment.epoch, assignment.revision) >= accepted.order


def _assigned(journal: JournalState, assignment: Assignment | None, pod_uid: str) -> VersionRef | None:
    """Return what the file names for this pod: a candidate that was proved bad here falls back to stable."""
    if assignment is None:
        return None
    target = assignment.target_for(pod_uid)
    if target is assignment.candidate and target is not None and _refused_here(journal, target):
        target = assignment.stable or target
    return _ref(target)


def _refused_here(journal: JournalState, target: AssignmentTarget) -> bool:
    """Say whether a swap to this content failed for the content itself, and none to it succeeded since.

    All outcomes count, not only the latest decision's: the fallback of the last restart was a decision too.
    """
    for status in reversed(journal.outcomes):
        if target.digest and status.target.digest == target.digest:
            if status.state.succeeded:
                return False
            error = from_body(status.error) if status.error is not None else None
            if isinstance(error, Refused) and not error.retryable:
                return True
    return False


def _journaled(journal: JournalState, template: VersionRef) -> VersionRef | None:
    """Return what the journal says, None when it has nothing to say."""
    accepted = journal.accepted
    if journal.template and journal.template != template.uri and (accepted is None or not accepted.owned):
        return None  # somebody started this engine with another model on purpose
    if accepted is not None and accepted.owned and not accepted.operation_id:
        return accepted.target  # it came from an assignment file that is gone or older now
    if journal.intent is not None:
        return journal.intent.target  # staged and proved on all ranks, about to be live: it may have answered already
    return journal.served or (accepted.target if accepted is not None and accepted.owned else None)


def _ref(target: AssignmentTarget | None) -> VersionRef | None:
    if target is None:
        return None
    return VersionRef(
        version=target.version,
        uri=target.uri,
        digest=target.digest,
        credentials=target.credentials,
        verification=target.verification,
    )


def takeover(accepted: Accepted, assignment: Assignment | None, *, pod_uid: str) -> Accepted | None:
    """Return the decision that an assignment file puts in the place of the accepted one, None when it does not.

    A running process learns this way that its owner was deleted, or that the object was made anew.
    """
    if assignment is None:
        return None
    order = (assignment.epoch, assignment.revision)
    if assignment.owner_uid == accepted.owner_uid:
        released = assignment.released and order >= accepted.order
        return msgspec.structs.replace(accepted, released=True) if released else None
    if order <= accepted.order:
        return None
    return Accepted(
        owner_uid=assignment.owner_uid,
        epoch=assignment.epoch,
        revision=assignment.revision,
        target=_ref(assignment.target_for(pod_uid)) or VersionRef(),
        released=assignment.released,
    )


def interrupted(journal: JournalState, *, live: str, at: str) -> SwapStatus | None:
    """Return how an operation ended that a crash cut short, None when there is none.

    The journal says what was intended, ``live`` (the digest that was loaded and proved since) what became of it.
    """
    accepted = journal.accepted
    if accepted is None or not accepted.operation_id or journal.outcome(accepted.operation_id) is not None:
        return None
    intent = journal.intent if journal.intent and journal.intent.operation_id == accepted.operation_id else None
    target = intent.target if intent is not None else accepted.target
    reached = bool(target.digest) and target.digest == live
    state = SwapState.SERVING if reached else SwapState.ROLLED_BACK if intent else SwapState.ABORTED
    lost = NotReady("the engine was restarted before the swap was done", advice="it may be tried again")
    return SwapStatus(
        operation_id=accepted.operation_id,
        seq=1,
        state=state,
        revision=accepted.revision,
        source=intent.source if intent is not None else journal.served or VersionRef(),
        target=target,
        error=None if reached else lost.body(),
        finished_at=at,
    )
