"""What the pods of a slot must serve: the document that the operator writes and every sidecar obeys.

It outlives both: a pod that starts while the operator is down finds its version here.
"""

from enum import StrEnum
from typing import Final

import msgspec

from modelswap_engine.protocol.wire import Message

ASSIGNMENT_KEY: Final = "assignment.json"
"""The key of the slot's ConfigMap, and the name of the file where it is mounted."""


class AssignmentTarget(Message, frozen=True, kw_only=True):
    """A version as an assignment names it: always pinned by digest."""

    version: str = ""
    uri: str = ""
    digest: str = ""


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


class Assignment(Message, frozen=True, kw_only=True):
    """What each pod of a slot must serve: the key ``assignment.json`` of its ConfigMap (docs/architecture.md).

    ``engine_restart`` is None where an older operator wrote it: then the pod's own options decide.
    """

    owner_uid: str = msgspec.field(default="", name="ownerUID")
    epoch: int = 0
    revision: int = 0
    stable: AssignmentTarget | None = None
    candidate: AssignmentCandidate | None = None
    adapters: list[dict[str, str]] = []
    released: bool = False
    weights: WeightsPolicy = WeightsPolicy.MANAGED
    engine_restart: EngineRestart | None = None

    def target_for(self, pod_uid: str) -> AssignmentTarget | None:
        """Return what the pod with this UID must serve, or None when nothing has been assigned."""
        if self.candidate is not None and pod_uid in self.candidate.pod_uids:
            return self.candidate
        return self.stable
