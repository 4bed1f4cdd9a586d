"""Everything that is known about one slot at one moment.

A decision sees nothing but this value and ``now``; whatever it needs to know has to be put here by ``effects`` and
``runtime``. It refuses to know how the facts were had.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import msgspec

from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.messages import Plan
from modelswap_engine.protocol.policy import Verification
from modelswap_operator.api.loraadapter import LoRAAdapterSpec, LoRAAdapterStatus
from modelswap_operator.api.modelversion import ModelVersionSpec, ModelVersionStatus
from modelswap_operator.planning.changes import ChangePolicy


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """Why a pod's engine could not be asked; ``retry_at`` is when it is asked again without a new sign of life."""

    reason: str
    message: str
    since: datetime
    attempts: int
    retry_at: datetime


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod with the slot's label.

    Attributes:
        node: where it runs; empty until it was scheduled.
        port: the container port named ``modelswap`` or ``modelswap-tls``; None when the pod declares neither.
        tls: it is the latter.
        data_port: the container port named ``http``, which clients ask.
        ready: its Ready condition now.
        ever_ready: it has been Ready under this UID.
        finished: its phase is Failed or Succeeded.
        group: what makes it one of a group that holds one model together; empty for a pod of its own.
        engine: its sidecar's state, or why it is not known; None when there is nothing to ask yet.
    """

    name: str
    uid: str
    namespace: str = ""
    ip: str = ""
    node: str = ""
    port: int | None = None
    tls: bool = False
    data_port: int = 8000
    ready: bool = False
    ever_ready: bool = False
    terminating: bool = False
    finished: bool = False
    group: str = ""
    engine: EngineState | Unreachable | None = None

    @property
    def state(self) -> EngineState | None:
        """Return the engine's state if it was read in this pass."""
        return self.engine if isinstance(self.engine, EngineState) else None


class AdapterSince(msgspec.Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """Since which ``adaptersRevision`` an adapter is assigned without a break to each pod that it is meant for now.

    ``came`` is about the name, ``changed`` about what is served under it; both are 0 where nobody knows.
    """

    came: int = 0
    changed: int = 0


class Ledger(msgspec.Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """What only the operator needs to know again; kept beside the assignment, changed together with it.

    ``generation`` is the spec generation the assignment was decided for, ``previous`` what was stable before the
    current stable version: the place to go back to while a rollout is under way. ``adapters`` are those assigned.
    """

    generation: int = 0
    previous: AssignmentTarget | None = None
    adapters: dict[str, AdapterSince] = {}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One LoRAAdapter of the slot. ``spec`` is None when it cannot be read (``spec_error``).

    ``requested_at`` is the last that somebody asked by for another try now.
    """

    name: str
    uid: str = ""
    generation: int = 0
    created: str = ""
    spec: LoRAAdapterSpec | None = None
    spec_error: str = ""
    requested_at: str = ""
    status: LoRAAdapterStatus = field(default_factory=LoRAAdapterStatus)

    @property
    def asked_again(self) -> bool:
        """Say whether a person has asked, since the last pass, not to wait with the next try."""
        return self.requested_at not in ("", self.status.last_handled_request_at)


class ResolveKey(NamedTuple):
    """A source of an adapter that is to be looked up."""

    name: str
    uri: str
    base_digest: str
    credentials: str = ""
    verification: Verification | None = None


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What ``pod`` found at a source: pending while both ``digest`` and ``error`` are missing.

    ``late`` is True when the source did not answer in time at the last try.
    """

    pod: str
    digest: str = ""
    error: ErrorBody | None = None
    attempts: int = 0
    late: bool = False
    retry_at: datetime | None = None

    @property
    def pending(self) -> bool:
        """True while the pod is working on it."""
        return not self.digest and self.error is None


@dataclass(frozen=True, kw_only=True)
class Untold:
    """The last failed attempt to tell a pod of the adapters at ``revision``."""

    revision: int
    attempts: int
    retry_at: datetime
    error: ErrorBody


class PlanKey(NamedTuple):
    """What a plan is about: the wanted source, and the version a pod comes from."""

    version: str
    uri: str
    pin: str
    from_digest: str


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan asked of ``pod``: pending while both ``plan`` and ``error`` are None."""

    pod: str
    plan: Plan | None = None
    error: ErrorBody | None = None
    attempts: int = 0
    retry_at: datetime | None = None

    @property
    def pending(self) -> bool:
        """True while the pod is working on it."""
        return self.plan is None and self.error is None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The last failed attempt to swap a pod at ``revision``."""

    operation_id: str
    revision: int
    digest: str
    attempts: int
    retry_at: datetime
    error: ErrorBody


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the slot has come for ``generation``, and when it last came further.

    ``marks`` is the high-water mark of each pod: a retry that repeats what was reached before is no progress.
    ``vacant_since`` is since when the slot has been seen without any pod, None while it has some; ``at_zero`` says that
    this has lasted long enough to be meant.
    """

    generation: int
    revision: int
    resolved: bool
    done: bool
    marks: Mapping[str, tuple[int, ...]]
    at: datetime
    vacant_since: datetime | None = None
    at_zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The source of the wanted version, or of an adapter, which may come to hold another content under its name.

    Attributes:
        due: when a pod is to look at it next.
        asked: one is looking.
        again: somebody has asked for a look since then: what the one that looks will say may be older.
        looks: how many times one was asked to.
        failures: how many of them in a row could not tell.
        found: what it held at the last look that was answered: "" for what was resolved; None before the first.
        revision: which files gave rise to ``found``, while that is a suspicion only.
        cleared: files that another pod had resolved since: they hold the same, whatever others say of them.
        held: the files that held what was resolved at the last look that found that.
    """

    uri: str
    digest: str
    due: datetime
    asked: bool = False
    again: bool = False
    looks: int = 0
    failures: int = 0
    found: str | None = None
    revision: str = ""
    cleared: tuple[str, ...] = ()
    held: str = ""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What this process remembers between passes. Losing it costs time and repeated questions, never a wrong decision.

    ``idle`` holds the UIDs of pods that were read without an operation in flight and asked for nothing since,
    ``unasked`` when those that could not be told what to fetch ahead are told again. ``watched_adapters`` are by name.
    ``led_away`` says of pods that an adapter's Service leads to no more when every node has heard of it, by the
    adapter's name and the pod's UID: None once they have.
    """

    plans: Mapping[PlanKey, PlanResult] = field(default_factory=dict)
    attempts: Mapping[str, Attempt] = field(default_factory=dict)
    progress: Progress | None = None
    idle: frozenset[str] = frozenset()
    resolved: Mapping[ResolveKey, Resolution] = field(default_factory=dict)
    untold: Mapping[str, Untold] = field(default_factory=dict)
    led_away: Mapping[str, Mapping[str, datetime | None]] = field(default_factory=dict)
    unasked: Mapping[str, datetime] = field(default_factory=dict)
    watched: Watched | None = None
    watched_adapters: Mapping[str, Watched] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What people ask for by annotations of the object; each names a generation."""

    abort: str = ""
    change_now: str = ""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One slot as it was observed. ``spec`` is None when the object is gone or unreadable (``spec_error``).

    ``operator`` is who looks, ``reserved_for`` who may act ("" is whoever watches it); both as namespace/lease.
    """

    namespace: str
    slot: str
    epoch: int
    uid: str = ""
    generation: int = 0
    deleted: bool = False
    spec: ModelVersionSpec | None = None
    spec_error: str = ""
    spec_manager: str = ""
    spec_time: str = ""
    requested_at: str = ""
    status: ModelVersionStatus = field(default_factory=ModelVersionStatus)
    pods: tuple[Pod, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    assignment: Assignment | None = None
    ledger: Ledger = field(default_factory=Ledger)
    memory: Memory = field(default_factory=Memory)
    asked: Asked = Asked()
    operator: str = ""
    reserved_for: str = ""
    policy: ChangePolicy = field(default_factory=ChangePolicy)

    @property
    def elsewhere(self) -> bool:
        """Say whether the object names another operator than this one, which then leaves it alone."""
        return self.reserved_for not in ("", self.operator)

    @property
    def asked_again(self) -> bool:
        """Say whether a person has asked, since the last pass, not to wait with the next try."""
        return self.requested_at not in ("", self.status.last_handled_request_at)
