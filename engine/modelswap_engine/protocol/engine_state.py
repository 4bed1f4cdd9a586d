"""What an engine is at this moment: the answer of ``GET /state``, the one view of everything.

A view, never an order: nothing here is sent to an engine.
"""

import msgspec

from modelswap_engine.protocol.adapters import AdapterRegistry
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.policy import TrafficMode
from modelswap_engine.protocol.prefetch import PrefetchState
from modelswap_engine.protocol.version import PROTOCOL_VERSION
from modelswap_engine.protocol.wire import Message


class LeaseState(Message, frozen=True, kw_only=True):
    """Somebody outside who holds new requests back, and for how long still."""

    id: str = ""
    owner: str = ""
    seconds_left: float = 0.0


class GateState(Message, frozen=True, kw_only=True):
    """The door for new requests.

    It is closed while any of ``holders`` (operations and recoveries of the engine itself) or ``leases`` is there;
    ``lease_id`` and what follows are of the lease that ends last.

    ``closures`` counts how often it closed, ``waits`` the requests that found it closed, since the process began.
    """

    open: bool = True
    queued: int = 0
    oldest_queued_seconds: float = 0.0
    holders: list[str] = []
    leases: list[LeaseState] = []
    in_flight: int = 0
    oldest_in_flight_seconds: float = 0.0
    closures: int = 0
    waits: int = 0
    lease_id: str = ""
    lease_owner: str = ""
    lease_seconds_left: float = 0.0


class ReaderState(Message, frozen=True, kw_only=True):
    """A request inside: the version it was let in to, whether the engine has its prompt, how long it has been here."""

    request_id: str = ""
    version: str = ""
    submitted: bool = False
    seconds: float = 0.0


class LockState(Message, frozen=True, kw_only=True):
    """The update lock: requests are its readers, an operation that exchanges weights its writer.

    ``by_version`` counts the readers by the digest they were let in to (two while instances overlap), ``oldest`` lists
    some of them.
    """

    writer: str = ""
    writer_seconds: float = 0.0
    readers: int = 0
    admitting: int = 0
    by_version: dict[str, int] = {}
    oldest: list[ReaderState] = []


class RankState(Message, frozen=True, kw_only=True):
    """One worker process. ``digest`` is what it proved under ``boot_id`` (empty: nothing proved yet).

    Ranks with the same ``replica`` hold one model together; ``running`` requests are counted on its first rank.
    ``restarts`` is how often the replica's processes were started again.
    """

    rank: int = 0
    boot_id: str = ""
    pid: int = 0
    alive: bool = False
    digest: str = ""
    replica: int = 0
    running: int = 0
    restarts: int = 0


class MemoryState(Message, frozen=True, kw_only=True):
    """Where the memory is, in bytes; ``limit`` and ``available`` are -1 when nothing bounds the process.

    Of the KV cache ``kv_free_bytes`` are free, and ``kv_cached_bytes`` belong to prefixes that no request uses now and
    the next one with the same beginning may find. The allocator took ``allocator_reserved_bytes`` from the system, of
    which ``allocator_used_bytes`` are handed out: the rest are holes. ``instance_bytes`` is what a second instance
    takes beside the weights that differ, in traffic mode Overlap. ``device`` names where the weights and the KV cache
    lie; the two figures of it are -1 where that is the memory of the process.
    """

    model_bytes: int = 0
    staged_bytes: int = 0
    previous_bytes: int = 0
    kv_cache_bytes: int = 0
    kv_free_bytes: int = 0
    kv_cached_bytes: int = 0
    adapter_bytes: int = 0
    instance_bytes: int = 0
    rss_bytes: int = 0
    allocator_used_bytes: int = 0
    allocator_reserved_bytes: int = 0
    limit_bytes: int = -1
    available_bytes: int = -1
    device: str = ""
    device_limit_bytes: int = -1
    device_available_bytes: int = -1

    @property
    def room_bytes(self) -> int:
        """What tensors may take where they lie: on the device, else in the process; -1 when nothing bounds it."""
        return self.device_available_bytes if self.device_available_bytes >= 0 else self.available_bytes


class AuditState(Message, frozen=True, kw_only=True):
    """The last full re-hash of the live tensors."""

    digest: str = ""
    ok: bool | None = None
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    mismatched: list[str] = []
    finished_at: str = ""


class CheckState(AuditState, frozen=True, kw_only=True):
    """The last check that somebody asked for: of the tensors that match ``pattern``."""

    action: str = "Verify"
    pattern: str = "*"


class UpdateState(Message, frozen=True, kw_only=True):
    """An open weight update: what has arrived so far; nothing of it is live.

    ``seconds_left`` is the rest of its lease; each call about the update starts it again.
    """

    update_id: str
    owner: str = ""
    seconds_left: float = 0.0
    base: VersionRef = VersionRef()
    tensors: int = 0
    bytes: int = 0
    sources: list[str] = []


class AnswerCount(Message, frozen=True, kw_only=True):
    """How many requests one version was let in to have ended since the process began, by how they ended.

    ``answered`` got what they asked for and ``failed`` an error that is not theirs, be it within a stream; ``rejected``
    asked for what cannot be had, and ``disconnected`` went away: these say nothing about the version.
    """

    digest: str
    answered: int = 0
    failed: int = 0
    rejected: int = 0
    disconnected: int = 0


class Capabilities(Message, frozen=True, kw_only=True):
    """What this backend can do; asked, never assumed.

    ``commit_method`` is how a commit makes tensors live: ``pointer``, or ``copy`` where addresses must stay; then the
    old values are saved before, which takes as much memory again. ``refused_modes`` says why a mode is not there.
    ``tries_live`` says that prompts of ``checks`` are run after the commit, while new requests wait, and not on what is
    staged.
    """

    kind: str = "embedded"
    version: str = ""
    traffic_modes: list[TrafficMode] = msgspec.field(default_factory=lambda: [TrafficMode.DRAIN, TrafficMode.RECOMPUTE])
    refused_modes: dict[str, str] = {}
    rollback: bool = True
    commit_method: str = "pointer"
    max_loras: int = 0
    tries_live: bool = False


class LoadFailure(Message, frozen=True, kw_only=True):
    """Why the last try to load what must be served came to nothing; it is tried again."""

    target: VersionRef
    error: ErrorBody


class EngineState(Message, frozen=True, kw_only=True):
    """``GET /state``: the one view of everything; its ``ETag`` is ``"<bootId>.<seq>"``.

    ``live`` is None until a version has been proved under the current boot id.

    Attributes:
        load_failure: which version could not be loaded, and why; None while one is live, and in older sidecars.
        decided: the version of the last decision that was accepted and has served here; what serves now may be what a
            trainer made of it since.
        previous_seconds_left: how long the previous version is still retained, -1 for as long as there is room.
        drifted: live tensors that are not what the live version says; nobody is answered until they are repaired.
        repairs: how often such tensors were repaired.
        repair: the last attempt to do so.
        answers: ended requests by version, the last few of them; None where the sidecar is too old to count. They move
            without ``seq``.
        prefetch: versions that are fetched before anybody swaps to them.
        restart_advice: why a cold restart is advised, "" when it is not; nothing restarts by itself.
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
    load_failure: LoadFailure | None = None
    served_model_name: str = ""
    owner_uid: str = ""
    epoch: int = 0
    revision: int = 0
    decided: VersionRef | None = None
    live: VersionRef | None = None
    previous: VersionRef | None = None
    previous_seconds_left: float = -1.0
    drifted: list[str] = []
    repairs: int = 0
    repair: SwapStatus | None = None
    restart_advice: str = ""
    answers: list[AnswerCount] | None = None
    gate: GateState = GateState()
    lock: LockState = LockState()
    operation: SwapStatus | None = None
    update: UpdateState | None = None
    ranks: list[RankState] = []
    memory: MemoryState = MemoryState()
    audit: AuditState | None = None
    last_check: CheckState | None = None
    assignment_revision: int = 0
    capabilities: Capabilities = Capabilities()
    swaps_completed: int = 0
    restarts: int = 0
    adapters: AdapterRegistry | None = None
    prefetch: list[PrefetchState] = []
