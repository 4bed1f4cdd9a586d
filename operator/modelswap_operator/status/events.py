"""Which Events a pass is worth: one per change or outcome, never one per loop. Pure."""

from dataclasses import dataclass

from modelswap_operator.api.conditions import Condition, find
from modelswap_operator.api.loraadapter import LoRAAdapterStatus
from modelswap_operator.api.modelversion import ModelVersionStatus, PodStatus, TargetStatus
from modelswap_operator.api.reasons import ConditionType, Reason
from modelswap_operator.planning.actions import Action, CancelSwaps, StartSwaps, WriteAssignment
from modelswap_operator.status.pods import DAMAGED, LISTED

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
                    reason=Reason.SWAP_STARTED if o.request.hold is None else Reason.STAGING_STARTED,
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
                    text=f"pod {o.pod.name}: {o.why}",
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
    if before.operator not in ("", after.operator):
        text = f"{after.operator} decides now, {before.operator} did before"
        notes.append(Note(reason=Reason.OPERATOR_CHANGED, action="Reconcile", text=text, warning=True))
    notes += [*_drifted(before, after), *_source(before, after)]
    ready = of_ready(before, after)
    return (*notes, *(note for note in ready if not any(n.reason == note.reason for n in notes)))


def of_adapter(before: LoRAAdapterStatus, after: LoRAAdapterStatus) -> tuple[Note, ...]:
    """Return what is worth telling about a change of an adapter's status."""
    return (*_source(before, after), *of_ready(before, after))


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


def _drifted(before: ModelVersionStatus, after: ModelVersionStatus) -> list[Note]:
    """Return what happened to pods of a slot that was at rest, and that nobody decided here."""
    ready, target = find(before.conditions, ConditionType.READY), after.target
    if ready is None or not ready.true or target is None or before.target is None:
        return []
    if before.target.digest != target.digest or before.observed_generation != after.observed_generation:
        return []
    known = {row.uid: row for row in before.pods}
    # Of a slot at rest status leaves out pods that served what they should; else one that is not listed is new.
    others = PodStatus(name="", digest=target.digest if len(before.pods) == LISTED else "")
    notes = (_of_pod(known.get(row.uid, others), row, target) for row in after.pods)
    return [note for note in notes if note is not None]


def _source(before: Status, after: Status) -> list[Note]:
    old, new = (find(s.conditions, ConditionType.SOURCE_DRIFTED) for s in (before, after))
    return [Note(reason=new.reason, action="Look", text=new.message, warning=True)] if new and not old else []


def _of_pod(old: PodStatus, row: PodStatus, target: TargetStatus) -> Note | None:
    if row.state == DAMAGED and old.state != DAMAGED:
        return Note(reason=Reason.DRIFTED, action="Repair", text=f"pod {row.name}: {row.message}", warning=True)
    if "" not in (old.boot_id, row.boot_id) and old.boot_id != row.boot_id:
        serves = f", and it serves {row.version}" if row.digest == target.digest else ""
        text = f"pod {row.name}: its engine was started again (boot id {row.boot_id}){serves}"
        return Note(reason=Reason.ENGINE_RESTARTED, action="Reconcile", text=text, warning=True)
    if row.state in ("Starting", "Serving") or row.digest in ("", target.digest):
        return None
    if old.digest != target.digest:
        return None
    text = f"pod {row.name} serves {row.version or row.digest} instead of {target.version}, by nobody's decision here"
    return Note(reason=Reason.DRIFTED, action="Repair", text=f"{text}: it is put right", warning=True)


def _moved(old: Condition | None, new: Condition) -> bool:
    return old is None or (old.status, old.reason) != (new.status, new.reason)


def _troubled(status: Status) -> bool:
    reconciling = find(status.conditions, ConditionType.RECONCILING)
    return reconciling is not None and reconciling.reason == Reason.PROGRESSING_WITH_RETRY
