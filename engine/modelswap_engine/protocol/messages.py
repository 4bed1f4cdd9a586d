"""What is asked of an engine, and the answers: plans, swaps, checks and leases.

Who asks and how recent the decision is stands in the fence; how it is to be done in `policy`; what the engine
is at this moment in `engine_state`.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from modelswap_engine.protocol.adapters import AdapterChange
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.holding import Hold, HoldSeconds, HoldState
from modelswap_engine.protocol.policy import Checks, DrainSeconds, Loading, LoadingMode, Traffic, Verification
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.wire import LONGEST_ID, Message

LONGEST_LEASE_SECONDS: Final = 3600


class Fence(Message, frozen=True, kw_only=True):
    """Who decides, and how recent the decision is (docs/architecture.md, Who may decide).

    Attributes:
        pod_uid: the pod the call is meant for; a sidecar outside Kubernetes has the UID ``""``.
        owner_uid: UID of the ModelVersion object, or ``cli`` for the break-glass path.
        epoch: lease epoch of the operator's leader election, only ever rising.
        revision: number of the slot's decision, only ever rising.
    """

    pod_uid: str = ""
    owner_uid: str = ""
    epoch: int = 0
    revision: int = 0


class VersionRef(Message, frozen=True, kw_only=True):
    """A version: a label for people, a digest for identity, a place to fetch it from.

    ``credentials`` names those, mounted in the pod, that the place is asked with; "" takes the pod's own identity.
    ``verification`` is who must vouch for it; None leaves that to the engine.
    """

    version: str = ""
    uri: str = ""
    digest: str = ""
    credentials: str = ""
    verification: Verification | None = None


class PlanRequest(Message, frozen=True, kw_only=True):
    """``POST /plan``: what would a swap to ``target`` do? ``target.digest`` is a pin when not empty."""

    target: VersionRef
    traffic: Traffic = Traffic()
    loading: Loading = Loading()
    adapters: AdapterChange = AdapterChange()


class Plan(Message, frozen=True, kw_only=True):
    """What a swap would do; computed purely, published as it is.

    ``mode`` is the loading mode that was chosen, ``groups`` the number of fusion groups touched, ``bytes_to_fetch``
    what must travel (0 when the wanted tensors are retained from before), ``refusals`` why it would be refused,
    ``adapters`` which LoRA adapters change with the base. ``provenance`` is what the target's manifest says of where it
    comes from, ``signed_by`` who vouches for it where that was asked.
    """

    from_digest: str = ""
    to_digest: str = ""
    mode: LoadingMode = LoadingMode.DIFF
    changed_tensors: int = 0
    changed_bytes: int = 0
    total_tensors: int = 0
    total_bytes: int = 0
    groups: int = 0
    bytes_to_fetch: int = 0
    side_files: list[str] = []
    memory_needed: int = 0
    memory_available: int = -1
    refusals: list[ErrorBody] = []
    changed_names: list[str] = []
    adapters: list[str] = []
    provenance: dict[str, str] = {}
    signed_by: str = ""


class SwapRequest(Message, frozen=True, kw_only=True):
    """``POST /swaps``: asynchronous; the same ``operation_id`` always gets the same answer.

    With ``hold`` it stages and waits; a sidecar older than protocol version 2 would not, and must not be asked.
    """

    operation_id: str
    fence: Fence = Fence()
    target: VersionRef
    traffic: Traffic = Traffic()
    loading: Loading = Loading()
    adapters: AdapterChange = AdapterChange()
    checks: Checks = Checks()
    hold: Hold | None = None


class RollbackRequest(Message, frozen=True, kw_only=True):
    """``POST /rollback``: put the retained previous version back."""

    operation_id: str
    fence: Fence = Fence()
    traffic: Traffic = Traffic()
    adapters: AdapterChange = AdapterChange()


class CancelRequest(Message, frozen=True, kw_only=True):
    """``POST /swaps/{id}/cancel``: before COMMITTING the swap is aborted, later this is refused (409)."""

    fence: Fence = Fence()


class HoldRequest(Message, frozen=True, kw_only=True):
    """``POST /swaps/{id}/hold``: begin the lease of a swap that waits anew, for ``seconds`` from now."""

    fence: Fence = Fence()
    seconds: HoldSeconds


class ProceedRequest(Message, frozen=True, kw_only=True):
    """``POST /swaps/{id}/proceed``: let a swap that waits go on; it is the fence's decision from now on.

    ``peers_ready`` takes the place of the one that the swap was asked for with: others may serve now than did then.
    """

    fence: Fence = Fence()
    peers_ready: int = 0


class SwapStatus(Message, frozen=True, kw_only=True):
    """Progress and outcome of one operation; ``GET /swaps/{id}``, and each line of ``GET /swaps/{id}/events``.

    Attributes:
        seq: rises with each change of this status; lets a stream resume and a poller skip.
        stop_latency_seconds: closing the gate to the engine standing at a step boundary.
        commit_window_microseconds: step boundary until the new tensors are live on all ranks (slowest rank).
        pause_seconds: closing the gate to opening it, what a new request waits at most.
        bytes_fetched: tensor bytes read from the source; headers and side files are in ``header_bytes``.
        bytes_from_peers: tensor bytes that came from other pods of the slot instead.
        drained_requests: requests that a Drain waited for; ``recomputed_requests``, ``frozen_requests`` and
            ``aborted_requests`` are the running ones that the commit met, by what it did with them.
        overlapped_requests: requests that the old instance still had when the new one took over; ``forced_requests`` of
            them took too long and got an error.
        hold: it was asked to wait once it has staged, and was not told to go on; None when it does not wait.
        staging_seconds: how long it read and staged, None where nothing was.
        waited_requests: new requests that found the gate closed while the operation ran.
    """

    operation_id: str
    seq: int = 0
    state: SwapState = SwapState.PLANNED
    revision: int = 0
    source: VersionRef = VersionRef()
    target: VersionRef = VersionRef()
    plan: Plan | None = None
    hold: HoldState | None = None
    bytes_fetched: int = 0
    bytes_from_peers: int = 0
    header_bytes: int = 0
    bytes_staged: int = 0
    staging_seconds: float | None = None
    stop_latency_seconds: float | None = None
    commit_window_microseconds: float | None = None
    pause_seconds: float | None = None
    total_seconds: float | None = None
    drained_requests: int = 0
    recomputed_requests: int = 0
    frozen_requests: int = 0
    aborted_requests: int = 0
    overlapped_requests: int = 0
    forced_requests: int = 0
    waited_requests: int = 0
    commit_method: str = ""
    error: ErrorBody | None = None
    started_at: str = ""
    finished_at: str = ""

    @property
    def bytes_travelled(self) -> int:
        """Tensor bytes that came to the pod, from wherever."""
        return self.bytes_fetched + self.bytes_from_peers


class CheckAction(StrEnum):
    """What a check compares the live tensors with.

    ``VERIFY`` is the manifest of the live version. ``SNAPSHOT`` remembers their hashes, and ``COMPARE`` says which have
    changed since: tools for finding out who changes weights, off unless the engine was started with them.
    """

    VERIFY = "Verify"
    SNAPSHOT = "Snapshot"
    COMPARE = "Compare"


class CheckRequest(Message, frozen=True, kw_only=True):
    """``POST /check``: re-hash live tensors whose names match the glob ``pattern``.

    Some engines keep weights in a form that can only be looked into while they compute nothing. With ``still`` new
    requests wait until the check has ended, which begins when those inside have, in ``timeout_seconds`` at the latest.
    """

    pattern: str = "*"
    action: CheckAction = CheckAction.VERIFY
    still: bool = False
    timeout_seconds: DrainSeconds = 60.0


class Coordinates(StrEnum):
    """What a name and a hash of a live tensor stand for.

    ``CHECKPOINT``: a tensor of the checkpoint, as it can be had back from the live ones; the manifest has its hash.
    ``RUNTIME``: a parameter of the engine that was made with a loss; its hash was taken when it was made.
    """

    CHECKPOINT = "checkpoint"
    RUNTIME = "runtime"


class TensorCheck(Message, frozen=True, kw_only=True):
    """One live tensor against what the live version says about it; ``ranks`` are those that hold ``actual``.

    Ranks that hold different wrong bytes are told of one by one.
    """

    name: str
    expected: str
    actual: str
    ranks: list[int] = []
    coordinates: Coordinates = Coordinates.CHECKPOINT


class CheckResult(Message, frozen=True, kw_only=True):
    """``ok`` means every checked tensor is byte for byte what the live version's manifest (or the snapshot) says.

    ``tensors`` (name → sha256 as read back from live memory) lets a caller compare with a manifest of its own. It
    holds what all ``ranks`` agree on; ``disagreed`` says of the other tensors what each rank has.
    ``runtime`` are hashes of parameters that cannot be had back as the checkpoint has them; ``unread`` names checkpoint
    tensors that the engine does not read, so that nothing live depends on them. ``unverifiable`` names those that it
    reads and that nothing could be said of: they are not among the ``checked``, and with ``still`` there may be fewer.
    """

    digest: str = ""
    ok: bool = False
    checked: int = 0
    bytes: int = 0
    seconds: float = 0.0
    mismatched: list[TensorCheck] = []
    tensors: dict[str, str] = {}
    ranks: list[int] = []
    disagreed: dict[str, dict[int, str]] = {}
    runtime: dict[str, str] = {}
    unread: list[str] = []
    unverifiable: list[str] = []


class ReleaseRequest(Message, frozen=True, kw_only=True):
    """``POST /release``: give up the retained previous version, and with it going back in milliseconds."""

    fence: Fence = Fence()


LeaseId = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_ID)]


class PauseRequest(Message, frozen=True, kw_only=True):
    """``POST /pause``: hold new requests by lease; the same id again only renews the deadline."""

    lease_id: LeaseId
    owner: Annotated[str, msgspec.Meta(max_length=LONGEST_ID)] = ""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE_SECONDS)] = 30.0


class ResumeRequest(Message, frozen=True, kw_only=True):
    """``POST /resume``: give the lease back; an unknown id is a no-op, another owner's is refused."""

    lease_id: LeaseId
    owner: Annotated[str, msgspec.Meta(max_length=LONGEST_ID)] = ""
