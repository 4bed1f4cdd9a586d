"""What the name of a tensor says about where in a model it is. Pure, and true of names only.

Checkpoints of all families number their layers in the dotted name, so one rule does: the first number is the layer,
what stands before it the stack of layers, what follows the kind. Numbers after it (experts, parts of a sequence) do
not count for the kind. What an engine makes of a tensor is not known here; its own loading rules decide that.
"""

import re
from typing import Final, NamedTuple

_NUMBER: Final = re.compile(r"[0-9]{1,6}")
_PARAMETER: Final = re.compile(
    r"(weight|bias|scales?|zero_points?|zp|absmax|g_idx|qweight|qzeros|blocks|[a-z0-9]+_scales?)(_.*)?"
)


class Place(NamedTuple):
    """Where a tensor is.

    Attributes:
        stack: what stands before the number of the layer, "" outside of layers.
        layer: the number, -1 outside of layers.
        kind: the module without numbers, e.g. ``self_attn.q_proj``; outside of layers with all that leads to it.
        parameter: what of the module it is, e.g. ``weight``; "" when the name does not tell it from the module.
    """

    stack: str
    layer: int
    kind: str
    parameter: str


def place(name: str) -> Place:
    """Read the name of a tensor."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if _NUMBER.fullmatch(part)), -1)
    module = [part for part in parts[at + 1 :] if not _NUMBER.fullmatch(part)]
    parameter = module.pop() if len(module) > 1 and _PARAMETER.fullmatch(module[-1]) else ""
    kind = ".".join(module) or "(unnamed)"
    return Place(".".join(parts[: max(at, 0)]), int(parts[at]) if at >= 0 else -1, kind, parameter)
