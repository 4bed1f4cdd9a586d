"""What the pods of a slot must serve: the document that the operator writes and every sidecar obeys.

It outlives both: a pod that starts while the operator is down finds its version here.
"""

from enum import StrEnum
from typing import Final

import msgspec

from modelswap_engine.protocol.adapters import AdapterName, AdapterSource
from modelswap_engine.protocol.policy import DrainSeconds, Verification
from modelswap_engine.protocol.wire import Message

ASSIGNMENT_KEY: Final = "assignment.json"
"""The key of the slot's ConfigMap, and the name of the file where it is mounted."""


class AssignmentTarget(Message, frozen=True, kw_only=True):
    """A version as an assignment names it: always pinned by digest; the last two fields as in a :class:`VersionRef`."""

    version: str = ""
    uri: str = ""
    digest: str = ""
    credentials: str = ""
    verification: Verification | None = None


class AssignmentCandidate(AssignmentTarget, frozen=True, kw_only=True):
    """The version under canary, and the pods that must serve it."""

    pod_uids: list[str] = msgspec.field(default_factory=list, name="podUIDs")


class WeightsPolicy(StrEnum):
    """Who changes a slot's weights: its object alone, or a trainer through the engine's own routes."""

    MANAGED = "Managed"
    EXTERNAL = "External"


class EngineRestart(StrEnum):
    """Whether a pod that can prove neither version may be restarted, or is left to a person to look at."""

    ALLOWED = "Allowed"
    NEVER = "Never"


class AssignedSource(Message, frozen=True, kw_only=True):
    """Where an adapter's content is for one base, pinned by digest; an empty ``base_digest`` fits every base."""

    uri: str
    digest: str = ""
    base_digest: str = ""
    credentials: str = ""


class AssignedAdapter(Message, frozen=True, kw_only=True):
    """A LoRA adapter that pods of the slot must serve.

    Attributes:
        sources: one for each base; the one that fits the pod's live base is used, so that base and adapter can change
            together while other pods still serve the old base.
        drain_timeout_seconds: how long requests may go on with a content that was replaced or taken away.
        pod_uids: the pods that must serve it; None for all, also those that come later.
        verification: what is asked of its content when it is loaded.
        requested_at: another one than before asks for another try now, whatever was wrong.
    """

    name: AdapterName
    sources: list[AssignedSource] = []
    pinned: bool = False
    drain_timeout_seconds: DrainSeconds = 60.0
    pod_uids: list[str] | None = msgspec.field(default=None, name="podUIDs")
    verification: Verification | None = None
    requested_at: str = ""

    def source_for(self, base_digest: str) -> AdapterSource | None:
        """Return the content for a base: the one that is bound to it, else the one that is bound to none."""
        by_base = {source.base_digest: source for source in self.sources}
        found = by_base.get(base_digest) or by_base.get("")
        if found is None:
            return None
        return AdapterSource(
            name=self.name,
            uri=found.uri,
            digest=found.digest,
            base_digest=found.base_digest,
            pinned=self.pinned,
            credentials=found.credentials,
            verification=self.verification,
        )

    def meant_for(self, pod_uid: str) -> bool:
        """Say whether a pod must serve it."""
        return self.pod_uids is None or pod_uid in self.pod_uids


class Assignment(Message, frozen=True, kw_only=True):
    """What each pod of a slot must serve: the key ``assignment.json`` of its ConfigMap (docs/architecture.md).

    ``adapters`` have a count of decisions of their own, so that a change of an adapter is none of the version's.
    ``engine_restart`` is None where an older operator wrote it: then the pod's own options decide.
    """

    owner_uid: str = msgspec.field(default="", name="ownerUID")
    epoch: int = 0
    revision: int = 0
    stable: AssignmentTarget | None = None
    candidate: AssignmentCandidate | None = None
    adapters: list[AssignedAdapter] = []
    adapters_revision: int = 0
    released: bool = False
    weights: WeightsPolicy = WeightsPolicy.MANAGED
    engine_restart: EngineRestart | None = None

    def target_for(self, pod_uid: str) -> AssignmentTarget | None:
        """Return what the pod with this UID must serve, or None when nothing has been assigned."""
        if self.candidate is not None and pod_uid in self.candidate.pod_uids:
            return self.candidate
        return self.stable
