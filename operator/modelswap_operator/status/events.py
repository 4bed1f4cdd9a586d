"""Which Events a pass is worth: one per change or outcome, never one per loop. Pure."""

from dataclasses import dataclass

from modelswap_operator.api.conditions import Condition, find
from modelswap_operator.api.loraadapter import LoRAAdapterStatus
from modelswap_operator.api.modelversion import ModelVersionStatus
from modelswap_operator.api.reasons import ConditionType, Reason
from modelswap_operator.planning.actions import Action, CancelSwaps, StartSwaps, WriteAssignment

Status = ModelVersionStatus | LoRAAdapterStatus


@dataclass(frozen=True, kw_only=True)
class Note:
    """One Event to be; ``reason`` and ``action`` are of low cardinality."""

    reason: str
    action: str
    text: str
    warning: bool = False


def of_action(action: Action) -> tuple[Note, ...]:
    """Return what is worth telling about something that was just done."""
    match action:
        case WriteAssignment():
            text = f"revision {action.assignment.revision}: {action.why}"
            return (Note(reason=Reason.ASSIGNMENT_PUBLISHED, action="Assign", text=text),)
        case StartSwaps():
            return tuple(
                Note(
                    reason=Reason.SWAP_STARTED,
                    action="Swap",
                    text=f"pod {o.pod.name}: to {o.request.target.version} (revision {o.request.fence.revision})",
                )
                for o in action.orders
            )
        case CancelSwaps():
            return tuple(
                Note(
                    reason=Reason.SWAP_CANCELLED,
                    action="Cancel",
                    text=f"pod {o.pod.name}: superseded by a newer decision",
                )
                for o in action.orders
            )
        case _:
            return ()


def of_status(before: ModelVersionStatus, after: ModelVersionStatus) -> tuple[Note, ...]:
    """Return what is worth telling about a change of status."""
    notes = [
        Note(reason=f.reason, action="Swap", text=f.message, warning=True)
        for f in after.failures
        if f not in before.failures
    ]
    ready = of_ready(before, after)
    return (*notes, *(note for note in ready if not any(n.reason == note.reason for n in notes)))


def of_ready(before: Status, after: Status) -> tuple[Note, ...]:
    """Return what is worth telling about a change of Ready, of either kind."""
    old, new = (find(s.conditions, ConditionType.READY) for s in (before, after))
    if new is None or not _moved(old, new):
        return ()
    if new.status == "True":
        return (Note(reason=new.reason, action="Reconcile", text=new.message),)
    if new.status == "False" or _troubled(after):
        return (Note(reason=new.reason, action="Reconcile", text=new.message, warning=True),)
    return ()


def _moved(old: Condition | None, new: Condition) -> bool:
    return old is None or (old.status, old.reason) != (new.status, new.reason)


def _troubled(status: Status) -> bool:
    reconciling = find(status.conditions, ConditionType.RECONCILING)
    return reconciling is not None and reconciling.reason == Reason.PROGRESSING_WITH_RETRY
