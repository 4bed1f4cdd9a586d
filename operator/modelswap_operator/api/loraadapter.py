"""LoRAAdapter as typed values (docs/reference/api.md); the schema itself is ``crds/``."""

from typing import Final

import msgspec

from modelswap_operator.api.conditions import Condition
from modelswap_operator.api.modelversion import CredentialsRef, Value

ALL_PODS: Final = "All"


class ModelRef(Value, frozen=True, kw_only=True):
    """The slot the adapter belongs to."""

    name: str = ""


class SourceSpec(Value, frozen=True, kw_only=True):
    """The adapter for one base; ``digest`` is a pin when not empty, without ``base_digest`` it fits any base."""

    uri: str
    digest: str = ""
    base_digest: str = ""
    credentials_ref: CredentialsRef | None = None

    @property
    def credentials(self) -> str:
        """The name of the credentials; "" for the pods' own identity."""
        return self.credentials_ref.name if self.credentials_ref is not None else ""


class Placement(Value, frozen=True, kw_only=True):
    """On how many pods, or ``All``."""

    pods: int | str = ALL_PODS


class ServiceSpec(Value, frozen=True, kw_only=True):
    """A Service that leads to the pods with the adapter; named after the object when ``name`` is empty."""

    name: str = ""
    port: int = 8000


class LoRAAdapterSpec(Value, frozen=True, kw_only=True):
    """Which adapter the pods of which slot must serve."""

    adapter_name: str
    model_ref: ModelRef
    sources: tuple[SourceSpec, ...] = ()
    placement: Placement = Placement()
    pinned: bool = False
    drain_timeout_seconds: int = 60
    service: ServiceSpec | None = None
    suspend: bool = False


class AdapterTarget(Value, frozen=True, kw_only=True):
    """The source that fits the slot's base."""

    uri: str = ""
    digest: str = ""
    base_digest: str = ""


class AdapterPodStatus(Value, frozen=True, kw_only=True):
    """One pod as it was last read."""

    name: str
    uid: str = ""
    boot_id: str = msgspec.field(default="", name="bootID")
    digest: str = ""
    state: str = ""
    message: str = ""


class LoRAAdapterStatus(Value, frozen=True, kw_only=True):
    """What was observed; the counts are None before anything was. ``service`` names the Service that was made."""

    observed_generation: int = msgspec.field(default=-1)
    last_handled_request_at: str = ""
    target: AdapterTarget | None = None
    loaded_pods: int | None = None
    wanted_pods: int | None = None
    service: str = ""
    pods: tuple[AdapterPodStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()
