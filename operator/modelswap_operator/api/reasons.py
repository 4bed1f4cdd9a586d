"""Every condition type and reason this operator writes, in one table with its meaning for people.

Codes that an engine answers (``DigestMismatch``, ``InvalidCheckpoint``, …) are reasons as well, unchanged; their texts
come with the answer. The table holds what the operator itself decides.
"""

from enum import StrEnum
from typing import Final


class ConditionType(StrEnum):
    """Condition types; those of ``NEGATIVE_POLARITY`` are present only while True."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    SERVING = "Serving"
    WEIGHTS_VERIFIED = "WeightsVerified"
    SUSPENDED = "Suspended"
    SOURCE_DRIFTED = "SourceDrifted"


NEGATIVE_POLARITY: Final = frozenset(
    {ConditionType.RECONCILING, ConditionType.STALLED, ConditionType.SUSPENDED, ConditionType.SOURCE_DRIFTED}
)


class Reason(StrEnum):
    """Reasons of the operator's own."""

    SUCCEEDED = "Succeeded"
    SCALED_TO_ZERO = "ScaledToZero"
    PROGRESSING = "Progressing"
    PROGRESSING_WITH_RETRY = "ProgressingWithRetry"
    RESOLVING = "ResolvingSource"
    SWAPPING = "Swapping"
    STAGING = "Staging"
    SOAKING = "Soaking"
    ROLLING_BACK = "RollingBack"
    WAITING_FOR_PODS = "WaitingForPods"
    SUSPENDED = "Suspended"
    FROZEN = "ChangesFrozen"
    ABORTED = "Aborted"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    ROLLED_BACK = "RolledBack"
    HALTED = "Halted"
    INVALID_SPEC = "InvalidSpec"
    STALE_LEADER = "StaleLeader"
    OPERATOR_CHANGED = "OperatorChanged"

    GROUPS_UNSUPPORTED = "GroupsUnsupported"
    SOURCE_DRIFTED = "SourceDrifted"
    DRIFTED = "Drifted"
    ENGINE_RESTARTED = "EngineRestarted"

    ASSIGNMENT_PUBLISHED = "AssignmentPublished"
    STAGING_STARTED = "StagingStarted"
    SWAP_STARTED = "SwapStarted"
    SWAP_CANCELLED = "SwapCancelled"

    SLOT_NOT_FOUND = "SlotNotFound"
    NAME_TAKEN = "NameTaken"
    TOO_MANY_ADAPTERS = "TooManyAdapters"
    NO_SOURCE_FOR_BASE = "NoSourceForBase"
    ADAPTERS_UNSUPPORTED = "AdaptersUnsupported"
    LOADING_ADAPTER = "LoadingAdapter"
    BLOCKED_BY_ADAPTER = "BlockedByAdapter"
    SERVICE_TAKEN = "ServiceTaken"
    SERVICE_REFUSED = "ServiceRefused"

    PODS_SERVE = "PodsServe"
    NO_POD_SERVES = "NoPodServes"
    NO_PODS = "NoPods"
    PROVED = "ProvedByEngines"
    NOT_PROVED = "NotProved"

    ENGINE_UNREACHABLE = "EngineUnreachable"
    ENGINE_TIMEOUT = "EngineTimeout"
    ENGINE_TLS_REFUSED = "EngineTlsRefused"
    ENGINE_TLS_MODE = "EngineTlsMode"
    ENGINE_DENIED = "EngineDenied"
    ENGINE_FAILED = "EngineFailed"
    ENGINE_NOT_READY = "EngineNotReady"
    ENGINE_PROTOCOL = "EngineProtocolUnsupported"
    TOKEN_REFUSED = "TokenRequestRefused"  # noqa: S105 - a reason, not a secret
    WRONG_POD = "WrongPod"
    NO_CONTROL_PORT = "NoControlPort"
    NO_POD_IP = "NoPodIP"
    QUARANTINED = "Quarantined"
    LOAD_FAILED = "LoadFailed"
    CANDIDATE_LOST = "CandidateLost"
    CANARY_FAILED = "CanaryFailed"


TEXTS: Final[dict[Reason, str]] = {
    Reason.SUCCEEDED: "every counted pod proved the wanted digest under its current boot id",
    Reason.SCALED_TO_ZERO: "the slot has no pods any more; the message says what those that come start on",
    Reason.PROGRESSING: "the slot is on its way to the wanted version",
    Reason.PROGRESSING_WITH_RETRY: "an attempt failed in a way that may heal; it is tried again",
    Reason.RESOLVING: "a pod is asked what the source holds and what a swap to it would do",
    Reason.SWAPPING: "pods are changing their weights",
    Reason.STAGING: "pods bring the version beside the one that they serve; none of them has changed yet",
    Reason.SOAKING: "canary pods serve the version; the others follow once rollout.canary is satisfied",
    Reason.ROLLING_BACK: "pods go back to the stable version",
    Reason.WAITING_FOR_PODS: "no pod of the slot has been ready yet, or fewer than an adapter is to be on",
    Reason.SUSPENDED: "spec.suspend is true: the plan is published and nothing is changed",
    Reason.FROZEN: "versions may not change now, by the ConfigMap changes.modelswap.dev beside the operator",
    Reason.ABORTED: "a person gave the rollout up, by the annotation modelswap.dev/abort",
    Reason.PROGRESS_DEADLINE_EXCEEDED: "no progress within rollout.progressDeadlineSeconds",
    Reason.ROLLED_BACK: "a pod failed the version, so the stable version is served again",
    Reason.HALTED: "a pod failed the version and rollout.onFailure is Halt, so every pod stays as it is",
    Reason.INVALID_SPEC: "the spec cannot be read",
    Reason.OPERATOR_CHANGED: "another operator than before decides about the object; two that watch it both do",
    Reason.STALE_LEADER: "decisions under a higher epoch were seen; without the lease this operator changes nothing",
    Reason.GROUPS_UNSUPPORTED: "a pod is one of a group that holds one model together; single pods only are changed",
    Reason.SOURCE_DRIFTED: "the source holds other content under its name than when it was resolved",
    Reason.DRIFTED: "a pod serves what nobody decided here, or live tensors are damaged; it is put right",
    Reason.ENGINE_RESTARTED: "the engine of a pod was started again",
    Reason.ASSIGNMENT_PUBLISHED: "a decision was written: what each pod of the slot must serve",
    Reason.STAGING_STARTED: "a pod has begun to stage the version beside the one that it serves",
    Reason.SWAP_STARTED: "a pod has accepted a swap, or is told to go on with the one that it has staged",
    Reason.SWAP_CANCELLED: "a swap under way is not wanted any more; the pod drops what it staged",
    Reason.SLOT_NOT_FOUND: "the namespace has no ModelVersion with the name in spec.modelRef: create it, or correct it",
    Reason.NAME_TAKEN: "an older LoRAAdapter of the slot, or its base model, has this name",
    Reason.TOO_MANY_ADAPTERS: "the slot's assignment has no room for another adapter",
    Reason.NO_SOURCE_FOR_BASE: "no entry of the LoRAAdapter's spec.sources fits the base that is served: add one",
    Reason.ADAPTERS_UNSUPPORTED: "the engine serves no adapters: start it with slots for them (--lora-slots)",
    Reason.LOADING_ADAPTER: "pods are loading the adapter",
    Reason.BLOCKED_BY_ADAPTER: "an adapter has nothing for the new base: add it to spec.sources of the LoRAAdapter, "
    "delete that, or set spec.adapters.onIncompatible: Unload in the ModelVersion",
    Reason.SERVICE_TAKEN: "a Service or EndpointSlice of this name is not this adapter's: set spec.service.name, or "
    "delete it",
    Reason.SERVICE_REFUSED: "the API server did not take the adapter's Service: where it is forbidden, set "
    "rbac.adapterServices in the operator's chart",
    Reason.PODS_SERVE: "pods answer requests",
    Reason.NO_POD_SERVES: "no reachable pod answers requests",
    Reason.NO_PODS: "the slot has no pods",
    Reason.PROVED: "the digest was read back from every counted pod",
    Reason.NOT_PROVED: "some counted pod has not proved the wanted digest",
    Reason.ENGINE_UNREACHABLE: "no connection to the pod's control port: check the pod, its port and NetworkPolicies",
    Reason.ENGINE_TIMEOUT: "the pod's control port did not answer in time: check the pod's load and its logs",
    Reason.ENGINE_TLS_REFUSED: "the pod did not prove its name by a certificate: compare it with controlTls.ca "
    "and controlTls.serverName of the operator",
    Reason.ENGINE_TLS_MODE: "the pod and the operator's controlTls.mode do not fit: plain HTTP where TLS is required, "
    "or TLS where it is disabled",
    Reason.ENGINE_DENIED: "the pod refused the operator's token: check the engine's --allowed-subject and its clock",
    Reason.ENGINE_FAILED: "the engine answered with an error",
    Reason.ENGINE_NOT_READY: "the engine has proved no version yet: see the pod's logs",
    Reason.ENGINE_PROTOCOL: "the sidecar's protocol is not this operator's, or too old: upgrade the engine image",
    Reason.TOKEN_REFUSED: "the API server gave no token for the pod: check the operator's Role (serviceaccounts/token)",
    Reason.WRONG_POD: "another pod answers at this address: pod IPs are reused; it is asked again",
    Reason.NO_CONTROL_PORT: "the pod has no container port named modelswap or modelswap-tls: install it with the "
    "modelswap-engine chart",
    Reason.NO_POD_IP: "the pod has no IP address yet",
    Reason.QUARANTINED: "neither old nor new weights could be proved; the pod is out of rotation until it restarts",
    Reason.LOAD_FAILED: "the engine could not load the version that it was assigned: see the pod's logs",
    Reason.CANDIDATE_LOST: "the pod that was to serve the version first went down and did not come back",
    Reason.CANARY_FAILED: "too many requests failed on the canary pods, or their engines kept restarting",
}
"""What each reason means and, where there is one, the next step."""
