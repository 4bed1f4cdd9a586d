"""Builds a version beside the live one: reads whole fusion groups, proves them, and puts them into runtime layout.

Touches nothing that is live; when it raises, nothing of it is left.
"""

from collections.abc import Mapping, Sequence

import torch

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.protocol.errors import IncompatibleModel
from modelswap_engine.weights.live import LiveTable
from modelswap_engine.weights.mapping import Group, Loader
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.reader import check_shape, dtype_of, read_group


def touched_groups(
    wanted: Sequence[TensorRange], home: Mapping[str, Group], shapes: Mapping[str, torch.Tensor]
) -> list[tuple[Group, list[TensorRange]]]:
    """Sort the wanted tensors into their groups; the ones that the engine does not read are left out.

    ``home`` maps checkpoint names to groups, ``shapes`` all names of the checkpoint to meta tensors.

    Raises:
        IncompatibleModel: an unknown name, another shape or dtype, or a group of which only a part is there.
    """
    found: dict[Group, list[TensorRange]] = {}
    for item in wanted:
        check_shape(item)
        if item.name not in shapes:
            raise IncompatibleModel(
                f"tensor {item.name} is not part of the running model",
                advice="the version is of another architecture; deploy it with a restart",
                details={"tensor": item.name},
            )
        _same_kind(item, shapes[item.name])
        if item.name in home:
            found.setdefault(home[item.name], []).append(item)
    for group, members in found.items():
        absent = sorted(set(group.sources) - {member.name for member in members})
        if absent:
            raise IncompatibleModel(
                f"tensor {absent[0]} is missing: it is fused with {members[0].name} and must be staged with it",
                advice="stage whole fusion groups, as the layout lists them",
                details={"tensor": absent[0], "with": members[0].name},
            )
    return list(found.items())


def _same_kind(item: TensorRange, known: torch.Tensor) -> None:
    if tuple(known.shape) == item.shape and known.dtype == dtype_of(item):
        return
    raise IncompatibleModel(
        f"tensor {item.name} is {item.dtype}{list(item.shape)}, the running model's is "
        f"{str(known.dtype).removeprefix('torch.')}{list(known.shape)}",
        advice="shapes and dtypes cannot change while the model runs; deploy this version with a restart",
        details={"tensor": item.name, "expected": str(list(known.shape)), "actual": str(list(item.shape))},
    )


def build_group(
    group: Group, members: Sequence[TensorRange], loader: Loader, table: LiveTable, *, pace: Pace
) -> dict[str, torch.Tensor]:
    """Read one group and return its runtime tensors by slot.

    Raises:
        IncompatibleModel: tied tensors disagree, or the result does not fit its slot.
    """
    tensors = read_group(members, pace=pace)
    made: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    for part in group.parts:
        built = loader.build(part, {name: tensors[name] for name in part.sources})
        for target, tensor in built.items():
            slot = table.slot_of(target).name
            ready = table.check(target, tensor)
            if slot in made and not _same_bytes(made[slot], ready):
                raise IncompatibleModel(
                    f"tensors {origin[slot]} and {part.sources[0]} are tied in this model, but differ",
                    advice="save the checkpoint with equal tensors, or with only one of them",
                    details={"tensor": part.sources[0], "tiedTo": origin[slot]},
                )
            made.setdefault(slot, ready)
            origin.setdefault(slot, part.sources[0])
    if set(made) != set(group.slots):
        raise IncompatibleModel(
            f"the tensors around {group.sources[0]} fill {sorted(made)}, not {list(group.slots)}",
            advice="the version is of another architecture; deploy it with a restart",
            details={"tensor": group.sources[0]},
        )
    return made


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
