"""What can be done next for a slot. Values only; ``effects.perform`` carries them out."""

from dataclasses import dataclass, field
from datetime import datetime

from modelswap_engine.protocol.adapter_calls import AssignAdaptersRequest, ResolveAdaptersRequest
from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.looking import LookRequest
from modelswap_engine.protocol.messages import HoldRequest, PlanRequest, SwapRequest
from modelswap_engine.protocol.prefetch import PrefetchRequest
from modelswap_operator.api.modelversion import Failure
from modelswap_operator.planning.snapshot import Ledger, PlanKey, Pod, ResolveKey


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do before ``until`` (or before something happens, when None)."""

    until: datetime | None = None
    on: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordFailure:
    """Write a content failure into status before anything follows from it, so that a crash cannot forget it."""

    failure: Failure


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """One swap that ended without success, for a cause that may heal."""

    pod: Pod
    operation_id: str
    revision: int
    digest: str
    error: ErrorBody


@dataclass(frozen=True, kw_only=True)
class NoteAttempts:
    """Remember failed attempts, so that the next ones wait longer."""

    attempts: tuple[FailedAttempt, ...]


@dataclass(frozen=True, kw_only=True)
class PlanOrder:
    """Ask one pod what a swap to the source would do."""

    pod: Pod
    key: PlanKey
    request: PlanRequest


@dataclass(frozen=True, kw_only=True)
class AskPlans:
    """Resolve the source, or publish what would be done: nothing changes in the pods asked."""

    orders: tuple[PlanOrder, ...]


@dataclass(frozen=True, kw_only=True)
class WriteAssignment:
    """Publish a decision: what each pod must serve, under a higher revision."""

    assignment: Assignment
    ledger: Ledger
    why: str


@dataclass(frozen=True, kw_only=True)
class CancelOrder:
    """Ask one pod to abort an operation that is no longer wanted."""

    pod: Pod
    operation_id: str
    revision: int
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class CancelSwaps:
    """Abort superseded operations that have not committed yet."""

    orders: tuple[CancelOrder, ...]


@dataclass(frozen=True, kw_only=True)
class SwapOrder:
    """Start one swap; ``if_match`` is the state the decision was made on.

    With ``goes_on`` the pod holds it staged already, and is only told to go on.
    """

    pod: Pod
    request: SwapRequest
    if_match: str
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True)
class StartSwaps:
    """Start as many swaps as may run at once."""

    orders: tuple[SwapOrder, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class HoldOrder:
    """Renew the lease of what one pod holds staged."""

    pod: Pod
    operation_id: str
    request: HoldRequest


@dataclass(frozen=True, kw_only=True)
class RenewHolds:
    """Renew the leases of what pods hold staged; one that cannot be renewed ends by itself."""

    orders: tuple[HoldOrder, ...]


@dataclass(frozen=True, kw_only=True)
class ResolveOrder:
    """Ask one pod what sources of adapters hold."""

    pod: Pod
    keys: tuple[ResolveKey, ...]
    request: ResolveAdaptersRequest


@dataclass(frozen=True, kw_only=True)
class AskAdapters:
    """Look sources of adapters up; nothing changes in the pod."""

    orders: tuple[ResolveOrder, ...]


@dataclass(frozen=True, kw_only=True)
class AdapterOrder:
    """Tell one pod which adapters are assigned."""

    pod: Pod
    request: AssignAdaptersRequest


@dataclass(frozen=True, kw_only=True)
class SendAdapters:
    """Tell pods of an assignment of adapters that they do not follow yet."""

    orders: tuple[AdapterOrder, ...]


@dataclass(frozen=True, kw_only=True)
class PrefetchOrder:
    """Tell one pod which versions to fetch ahead."""

    pod: Pod
    request: PrefetchRequest


@dataclass(frozen=True, kw_only=True)
class SendPrefetch:
    """Tell pods which versions to fetch ahead; they go on by themselves."""

    orders: tuple[PrefetchOrder, ...]


@dataclass(frozen=True, kw_only=True)
class UntoldPod:
    """A pod that could not be told of the adapters."""

    pod: Pod
    revision: int
    error: ErrorBody


@dataclass(frozen=True, kw_only=True)
class LookAtSource:
    """Ask one pod whether the source still holds what it serves; nothing changes in it.

    ``adapter`` is the one whose source it is; the base's where it is empty.
    """

    pod: Pod
    request: LookRequest
    adapter: str = ""


AdapterAction = AskAdapters | SendAdapters
SwapAction = CancelSwaps | StartSwaps | RenewHolds | SendPrefetch
Question = AskPlans | LookAtSource
Action = Wait | RecordFailure | NoteAttempts | Question | WriteAssignment | SwapAction | AdapterAction
