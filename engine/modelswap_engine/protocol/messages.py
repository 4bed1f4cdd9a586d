"""The messages of the control port, camelCase on the wire.

Byte counts are integers in bytes, durations floats in seconds unless the name says microseconds, times are
RFC 3339 strings in UTC, digests are ``sha256:<64 hex>``. Fields are only ever added; unknown ones are ignored.
"""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.version import PROTOCOL_VERSION

LONGEST_DRAIN_SECONDS: Final = 86400
LONGEST_LEASE_SECONDS: Final = 3600
LONGEST_ID: Final = 256
"""Characters of an operation's or a lease's id."""


class TrafficMode(StrEnum):
    """What happens to requests in flight (docs/architecture.md, Traffic modes)."""

    DRAIN = "Drain"
    OVERLAP = "Overlap"
    RECOMPUTE = "Recompute"
    FREEZE = "Freeze"
    ABORT = "Abort"


class OnTimeout(StrEnum):
    """What a Drain does when requests outlast its time."""

    CANCEL_SWAP = "CancelSwap"
    RECOMPUTE_REQUESTS = "RecomputeRequests"
    ABORT_REQUESTS = "AbortRequests"


class LoadingMode(StrEnum):
    """How tensors are chosen: ``AUTO`` falls back from diff to full when the layout is equal."""

    AUTO = "Auto"
    DIFF = "Diff"
    FULL = "Full"


class VerifyMode(StrEnum):
    """``STRICT`` hashes the live tensors before resume, ``STANDARD`` right after."""

    STANDARD = "Standard"
    STRICT = "Strict"


class Message(msgspec.Struct, rename="camel", omit_defaults=False, kw_only=True, frozen=True):
    """Base of all wire types."""


class Traffic(Message, frozen=True, kw_only=True):
    """How traffic is treated during the swap.

    ``peers_ready`` is how many other pods of the slot are Ready: when there are some, a Drain leaves the
    endpoints before it closes the gate.
    """

    mode: TrafficMode = TrafficMode.DRAIN
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_DRAIN_SECONDS)] = 60.0
    on_timeout: OnTimeout = OnTimeout.CANCEL_SWAP
    peers_ready: int = 0


class Loading(Message, frozen=True, kw_only=True):
    """How the new version is loaded."""

    mode: LoadingMode = LoadingMode.AUTO
    verify: VerifyMode = VerifyMode.STANDARD
    keep_previous: bool = True


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
    """A version: a label for people, a digest for identity, a place to fetch it from."""

    version: str = ""
    uri: str = ""
    digest: str = ""


class PlanRequest(Message, frozen=True, kw_only=True):
    """``POST /plan``: what would a swap to ``target`` do? ``target.digest`` is a pin when not empty."""

    target: VersionRef
    traffic: Traffic = Traffic()
    loading: Loading = Loading()


class Plan(Message, frozen=True, kw_only=True):
    """What a swap would do; computed purely, published as it is.

    ``mode`` is the loading mode that was chosen, ``groups`` the number of fusion groups touched, ``bytes_to_fetch``
    what must travel (0 when the wanted tensors are retained from before), ``refusals`` why it would be refused.
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


class SwapRequest(Message, frozen=True, kw_only=True):
    """``POST /swaps``: asynchronous; the same ``operation_id`` always gets the same answer."""

    operation_id: str
    fence: Fence = Fence()
    target: VersionRef
    traffic: Traffic = Traffic()
    loading: Loading = Loading()


class RollbackRequest(Message, frozen=True, kw_only=True):
    """``POST /rollback``: put the retained previous version back."""

    operation_id: str
    fence: Fence = Fence()
    traffic: Traffic = Traffic()


class CancelRequest(Message, frozen=True, kw_only=True):
    """``POST /swaps/{id}/cancel``: before COMMITTING the swap is aborted, later this is refused (409)."""

    fence: Fence = Fence()


class SwapStatus(Message, frozen=True, kw_only=True):
    """Progress and outcome of one operation; ``GET /swaps/{id}``, and each line of ``GET /swaps/{id}/events``.

    Attributes:
        seq: rises with each change of this status; lets a stream resume and a poller skip.
        stop_latency_seconds: closing the gate to the engine standing at a step boundary.
        commit_window_microseconds: step boundary until the new tensors are live on all ranks (slowest rank).
        pause_seconds: closing the gate to opening it, what a new request waits at most.
        bytes_fetched: tensor bytes read from the source; headers and side files are in ``header_bytes``.
    """

    operation_id: str
    seq: int = 0
    state: SwapState = SwapState.PLANNED
    revision: int = 0
    source: VersionRef = VersionRef()
    target: VersionRef = VersionRef()
    plan: Plan | None = None
    bytes_fetched: int = 0
    header_bytes: int = 0
    bytes_staged: int = 0
    stop_latency_seconds: float | None = None
    commit_window_microseconds: float | None = None
    pause_seconds: float | None = None
    total_seconds: float | None = None
    drained_requests: int = 0
    recomputed_requests: int = 0
    commit_method: str = ""
    error: ErrorBody | None = None
    started_at: str = ""
    finished_at: str = ""


class GateState(Message, frozen=True, kw_only=True):
    """The door for new requests."""

    open: bool = True
    queued: int = 0
    in_flight: int = 0
    oldest_in_flight_seconds: float = 0.0
    lease_id: str = ""
    lease_owner: str = ""
    lease_seconds_left: float = 0.0


class RankState(Message, frozen=True, kw_only=True):
    """One worker process. ``digest`` is what it proved under ``boot_id`` (empty: nothing proved yet)."""

    rank: int = 0
    boot_id: str = ""
    pid: int = 0
    alive: bool = False
    digest: str = ""


class MemoryState(Message, frozen=True, kw_only=True):
    """Where the memory is, in bytes; ``limit`` and ``available`` are -1 when nothing bounds the process."""

    model_bytes: int = 0
    staged_bytes: int = 0
    previous_bytes: int = 0
    kv_cache_bytes: int = 0
    rss_bytes: int = 0
    limit_bytes: int = -1
    available_bytes: int = -1


class AuditState(Message, frozen=True, kw_only=True):
    """The last full re-hash of the live tensors."""

    digest: str = ""
    ok: bool | None = None
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    mismatched: list[str] = []
    finished_at: str = ""


class Capabilities(Message, frozen=True, kw_only=True):
    """What this backend can do; asked, never assumed."""

    kind: str = "embedded"
    version: str = ""
    traffic_modes: list[TrafficMode] = msgspec.field(default_factory=lambda: [TrafficMode.DRAIN, TrafficMode.RECOMPUTE])
    rollback: bool = True
    max_loras: int = 0


class EngineState(Message, frozen=True, kw_only=True):
    """``GET /state``: the one view of everything; its ``ETag`` is ``"<bootId>.<seq>"``.

    ``live`` is None until a version has been proved under the current boot id.
    """

    protocol_version: int = PROTOCOL_VERSION
    software: str = ""
    pod_uid: str = ""
    boot_id: str = ""
    seq: int = 0
    ready: bool = False
    reason: str = ""
    message: str = ""
    quarantined: bool = False
    served_model_name: str = ""
    owner_uid: str = ""
    epoch: int = 0
    revision: int = 0
    live: VersionRef | None = None
    previous: VersionRef | None = None
    gate: GateState = GateState()
    operation: SwapStatus | None = None
    ranks: list[RankState] = []
    memory: MemoryState = MemoryState()
    audit: AuditState | None = None
    assignment_revision: int = 0
    capabilities: Capabilities = Capabilities()
    swaps_completed: int = 0
    restarts: int = 0


class CheckRequest(Message, frozen=True, kw_only=True):
    """``POST /check``: re-hash live tensors whose names match the glob ``pattern``."""

    pattern: str = "*"


class TensorCheck(Message, frozen=True, kw_only=True):
    """One live tensor against the manifest of the live version."""

    name: str
    expected: str
    actual: str


class CheckResult(Message, frozen=True, kw_only=True):
    """``ok`` means every checked tensor is byte for byte what the live version's manifest says.

    ``tensors`` (name → sha256 as read back from live memory) lets a caller compare with a manifest of its own.
    """

    digest: str = ""
    ok: bool = False
    checked: int = 0
    bytes: int = 0
    seconds: float = 0.0
    mismatched: list[TensorCheck] = []
    tensors: dict[str, str] = {}


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


class AssignmentTarget(Message, frozen=True, kw_only=True):
    """A version as an assignment names it: always pinned by digest."""

    version: str = ""
    uri: str = ""
    digest: str = ""


class AssignmentCandidate(AssignmentTarget, frozen=True, kw_only=True):
    """The version under canary, and the pods that must serve it."""

    pod_uids: list[str] = msgspec.field(default_factory=list, name="podUIDs")


class Assignment(Message, frozen=True, kw_only=True):
    """What each pod of a slot must serve: the key ``assignment.json`` of its ConfigMap (docs/architecture.md)."""

    owner_uid: str = msgspec.field(default="", name="ownerUID")
    epoch: int = 0
    revision: int = 0
    stable: AssignmentTarget | None = None
    candidate: AssignmentCandidate | None = None
    adapters: list[dict[str, str]] = []
    released: bool = False

    def target_for(self, pod_uid: str) -> AssignmentTarget | None:
        """Return what the pod with this UID must serve, or None when nothing has been assigned."""
        if self.candidate is not None and pod_uid in self.candidate.pod_uids:
            return self.candidate
        return self.stable


ASSIGNMENT_KEY = "assignment.json"
