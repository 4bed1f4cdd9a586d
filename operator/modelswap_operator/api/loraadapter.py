"""LoRAAdapter as typed values, as far as this release reads it."""

import msgspec

from modelswap_operator.api.conditions import Condition
from modelswap_operator.api.modelversion import Value


class ModelRef(Value, frozen=True, kw_only=True):
    """The slot the adapter belongs to."""

    name: str = ""


class LoRAAdapterSpec(Value, frozen=True, kw_only=True):
    """Which adapter, on which slot."""

    adapter_name: str = ""
    model_ref: ModelRef = ModelRef()
    suspend: bool = False


class LoRAAdapterStatus(Value, frozen=True, kw_only=True):
    """What was observed."""

    observed_generation: int = msgspec.field(default=-1)
    conditions: tuple[Condition, ...] = ()
