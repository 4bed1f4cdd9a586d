"""ModelVersion as typed values (docs/reference/api.md); the schema itself is ``crds/``.

Unknown fields are ignored, so that an older operator reads a newer object. Only fields that this release acts on are
declared; CEL refuses the others before they get here.
"""

from enum import StrEnum

import msgspec

from modelswap_engine.protocol.adapters import AdapterChange, OnIncompatible
from modelswap_engine.protocol.assignment import EngineRestart, WeightsPolicy
from modelswap_engine.protocol.messages import PlanRequest, VersionRef
from modelswap_engine.protocol.policy import (
    Checks,
    Loading,
    LoadingMode,
    OnTimeout,
    PromptCheck,
    Traffic,
    TrafficMode,
    Verification,
    VerifyMode,
)
from modelswap_operator.api.conditions import Condition


class Value(msgspec.Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """Base of the API types: camelCase, defaults left out, so that what we apply is what we own."""


class CredentialsRef(Value, frozen=True, kw_only=True):
    """Credentials by the name under which the engine chart mounts them."""

    name: str


class Source(Value, frozen=True, kw_only=True):
    """Where the checkpoint is; ``digest`` is a pin when not empty."""

    uri: str
    digest: str = ""
    credentials_ref: CredentialsRef | None = None

    @property
    def credentials(self) -> str:
        """The name of the credentials; "" for the pods' own identity."""
        return self.credentials_ref.name if self.credentials_ref is not None else ""


class OnFailure(StrEnum):
    """What happens to pods that have moved when another pod refuses the version."""

    ROLLBACK = "Rollback"
    HALT = "Halt"


class Canary(Value, frozen=True, kw_only=True):
    """What the first pods have to show before the others follow; ``pods`` 0 is one pod that has nothing to show."""

    pods: int = 0
    soak_seconds: int = 60
    min_requests: int = 0
    max_error_percent: int = 1


class Rollout(Value, frozen=True, kw_only=True):
    """How the version spreads; ``max_unavailable`` is a number or a percentage such as ``25%``."""

    max_unavailable: int | str = 1
    canary: Canary = Canary()
    stage_ahead: bool = True
    progress_deadline_seconds: int = 600
    on_failure: OnFailure = OnFailure.ROLLBACK


class TrafficSpec(Value, frozen=True, kw_only=True):
    """What happens to requests during a swap."""

    mode: TrafficMode = TrafficMode.DRAIN
    timeout_seconds: float = 60.0
    on_timeout: OnTimeout = OnTimeout.CANCEL_SWAP

    def to_wire(self, *, peers_ready: int = 0) -> Traffic:
        """Return it as the control port wants it."""
        return Traffic(
            mode=self.mode,
            timeout_seconds=self.timeout_seconds,
            on_timeout=self.on_timeout,
            peers_ready=peers_ready,
        )


class LoadingSpec(Value, frozen=True, kw_only=True):
    """How the weights are read and proved."""

    mode: LoadingMode = LoadingMode.AUTO
    verify: VerifyMode = VerifyMode.STANDARD
    keep_previous: bool = True

    def to_wire(self) -> Loading:
        """Return it as the control port wants it."""
        return Loading(mode=self.mode, verify=self.verify, keep_previous=self.keep_previous)


class PromptSpec(Value, frozen=True, kw_only=True):
    """One prompt that the new weights are tried with; ``max_logprob_delta`` is a decimal, "" compares nothing."""

    prompt: str
    max_logprob_delta: str = ""


class ChecksSpec(Value, frozen=True, kw_only=True):
    """What must hold before a new version answers anybody."""

    prompts: tuple[PromptSpec, ...] = ()

    def to_wire(self) -> Checks:
        """Return it as the control port wants it."""
        return Checks(
            prompts=[
                PromptCheck(
                    prompt=item.prompt,
                    max_logprob_delta=float(item.max_logprob_delta) if item.max_logprob_delta else None,
                )
                for item in self.prompts
            ]
        )


class VerificationSpec(Value, frozen=True, kw_only=True):
    """Whether a version must be signed, and by which of the keys that the pods have mounted."""

    required: bool = False
    keys: tuple[str, ...] = ()

    def to_wire(self) -> Verification | None:
        """Return it as the control port wants it; None asks for no more than the pods do by themselves."""
        return Verification(required=self.required, keys=self.keys) if self.required or self.keys else None


class AdaptersSpec(Value, frozen=True, kw_only=True):
    """What becomes of LoRA adapters that have nothing for the wanted base."""

    on_incompatible: OnIncompatible = OnIncompatible.BLOCK


class RecoverySpec(Value, frozen=True, kw_only=True):
    """What may be done to a pod whose weights can no longer be proved."""

    engine_restart: EngineRestart = EngineRestart.ALLOWED


class ModelVersionSpec(Value, frozen=True, kw_only=True):
    """What the slot must serve."""

    served_model_name: str
    version: str
    source: Source
    rollout: Rollout = Rollout()
    traffic: TrafficSpec = TrafficSpec()
    loading: LoadingSpec = LoadingSpec()
    checks: ChecksSpec = ChecksSpec()
    verification: VerificationSpec = VerificationSpec()
    revision_history_limit: int = 10
    prefetch: tuple[Source, ...] = ()
    adapters: AdaptersSpec = AdaptersSpec()
    recovery: RecoverySpec = RecoverySpec()
    weights: WeightsPolicy = WeightsPolicy.MANAGED
    suspend: bool = False

    def plan_request(self) -> PlanRequest:
        """Return what a pod is asked to find out what a swap to this would do."""
        return PlanRequest(
            target=VersionRef(
                version=self.version,
                uri=self.source.uri,
                digest=self.source.digest,
                credentials=self.source.credentials,
                verification=self.verification.to_wire(),
            ),
            traffic=self.traffic.to_wire(),
            loading=self.loading.to_wire(),
            adapters=AdapterChange(on_incompatible=self.adapters.on_incompatible),
        )


class TargetStatus(Value, frozen=True, kw_only=True):
    """The version to reach."""

    revision: int = 0
    version: str = ""
    digest: str = ""
    resolved_uri: str = msgspec.field(default="", name="resolvedURI")


class StableStatus(Value, frozen=True, kw_only=True):
    """The last version proved good."""

    revision: int = 0
    version: str = ""
    digest: str = ""


class VersionCount(Value, frozen=True, kw_only=True):
    """How many counted pods proved a digest."""

    version: str = ""
    digest: str = ""
    pods: int = 0


class SoakStatus(Value, frozen=True, kw_only=True):
    """From when, and from which counts, a canary pod serves the candidate under one boot id.

    ``restarts`` is how often its engine was started again since the pod served the candidate first.
    """

    uid: str
    boot_id: str = msgspec.field(default="", name="bootID")
    since: str = ""
    requests_before: int = 0
    errors_before: int = 0
    restarts: int = 0


class RolloutStatus(Value, frozen=True, kw_only=True):
    """Where the rollout stands."""

    state: str = ""
    attempt: int = 0
    candidate_pod_uids: tuple[str, ...] = msgspec.field(default=(), name="candidatePodUIDs")
    staged_pods: int = 0
    soak: tuple[SoakStatus, ...] = ()
    last_progress_time: str = ""


class PlanStatus(Value, frozen=True, kw_only=True):
    """The way from one version to the target; counts and bytes, adapters that change, and refusals as code and text.

    ``staging_seconds`` is what one pod is expected to take, 0 where nothing was ever measured.
    """

    from_digest: str = ""
    changed_tensors: int = 0
    total_tensors: int = 0
    changed_bytes: int = 0
    total_bytes: int = 0
    mode: str = ""
    groups: int = 0
    bytes_to_fetch: int = 0
    memory_needed_bytes: int = 0
    staging_seconds: int = 0
    staging_basis: str = ""
    adapters: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


class PodStatus(Value, frozen=True, kw_only=True):
    """One pod as it was last read."""

    name: str
    uid: str = ""
    boot_id: str = msgspec.field(default="", name="bootID")
    version: str = ""
    digest: str = ""
    state: str = ""
    message: str = ""


class PodCounts(Value, frozen=True, kw_only=True, omit_defaults=False):
    """How many pods the slot has, by what they count as."""

    total: int = 0
    counted: int = 0
    ready: int = 0
    excluded: int = 0


class Failure(Value, frozen=True, kw_only=True):
    """A content failure: never tried again for this generation and digest."""

    generation: int
    digest: str = ""
    reason: str = ""
    message: str = ""
    time: str = ""


class ProvenanceStatus(Value, frozen=True, kw_only=True):
    """What the manifest says of where a version comes from."""

    who: str = ""
    when: str = ""
    base: str = ""
    job: str = ""


class Revision(Value, frozen=True, kw_only=True):
    """One finished revision. The figures are those of the slowest pod, and the sum of what pods fetched."""

    revision: int
    version: str = ""
    digest: str = ""
    source: str = ""
    start_time: str = ""
    completion_time: str = ""
    result: str = ""
    commit_window_microseconds: int = 0
    bytes_fetched: int = 0
    staging_bytes_per_second: int = 0
    field_manager: str = ""
    provenance: ProvenanceStatus | None = None
    signed_by: str = ""


class PrefetchStatus(Value, frozen=True, kw_only=True):
    """A version of ``spec.prefetch``, and how many of the counted pods have it."""

    uri: str = ""
    digest: str = ""
    fetched_pods: int = 0
    message: str = ""


class ModelVersionStatus(Value, frozen=True, kw_only=True):
    """What was observed; written by this operator only."""

    observed_generation: int = msgspec.field(default=-1)
    last_handled_request_at: str = ""
    operator: str = ""
    target: TargetStatus | None = None
    stable: StableStatus | None = None
    versions: tuple[VersionCount, ...] = ()
    rollout: RolloutStatus | None = None
    plan: tuple[PlanStatus, ...] = ()
    pods: tuple[PodStatus, ...] = ()
    pod_counts: PodCounts | None = None
    failures: tuple[Failure, ...] = ()
    history: tuple[Revision, ...] = ()
    prefetch: tuple[PrefetchStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()
