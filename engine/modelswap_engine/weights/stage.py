"""Builds a version beside the live one: reads whole fusion groups, proves them, and puts them into runtime layout.

Touches nothing that is live; when it raises, nothing of it is left.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import torch

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.protocol.errors import IncompatibleModel
from modelswap_engine.weights.hashing import sha256_of
from modelswap_engine.weights.live import LiveTable
from modelswap_engine.weights.mapping import Group, Loader
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.packed import Packed
from modelswap_engine.weights.place import HOST, Place
from modelswap_engine.weights.reader import Fetch, check_shape, dtype_of, read_tensor, reading

_AHEAD: Final = 256 << 20


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


def build_groups(
    touched: Sequence[tuple[Group, list[TensorRange]]],
    loader: Loader,
    table: LiveTable,
    *,
    pace: Pace,
    threads: int = 0,
    fetch: Fetch = read_tensor,
    place: Place = HOST,
) -> tuple[dict[str, torch.Tensor | Packed], dict[str, str]]:
    """Read groups, the largest first; return their runtime tensors by slot, and the hashes of what is a slice.

    What ``fetch`` brings lies at ``place`` or is brought there.

    Reading runs ahead of building by a bounded number of bytes, so that of what is fused on the way only a little is
    in memory twice.

    Raises:
        ModelswapError: of :mod:`~modelswap_engine.weights.reader` and :func:`assemble`.
    """
    made: dict[str, torch.Tensor | Packed] = {}
    slices: dict[str, str] = {}
    waiting: deque[_Entry] = deque()
    ahead = 0
    with reading(pace=pace, threads=threads, fetch=fetch) as read:
        for group, members in sorted(touched, key=lambda item: _nbytes(item[1]), reverse=True):
            waiting.append((group, {member: read(member) for member in members}, _nbytes(members)))
            ahead += waiting[-1][2]
            while ahead > _AHEAD and len(waiting) > 1:
                ahead -= _finish(waiting.popleft(), made, slices, loader, table, place)
        while waiting:
            _finish(waiting.popleft(), made, slices, loader, table, place)
    place.settle()
    return made, slices


_Entry = tuple[Group, dict[TensorRange, Future[torch.Tensor]], int]


def _finish(
    entry: _Entry,
    made: dict[str, torch.Tensor | Packed],
    slices: dict[str, str],
    loader: Loader,
    table: LiveTable,
    place: Place,
) -> int:
    group, futures, nbytes = entry
    tensors = {member: future.result() for member, future in futures.items()}
    with place.beside():
        there = {member: tensor.to(place.device) for member, tensor in tensors.items()}
        # What came out of this process's own memory may be the slice already.
        whole = {member.name: tensor for member, tensor in there.items() if tuple(tensor.shape) == member.shape}
        cut = {member.name: tensor for member, tensor in there.items() if member.name not in whole}
        held, hashes = held_of(whole, loader, place)
        hashes |= {name: sha256_of(tensor, place) for name, tensor in cut.items()}
        made.update(assemble(group, held | cut, loader, table))
    slices.update(hashes)
    return nbytes


def _nbytes(members: Sequence[TensorRange]) -> int:
    return sum(member.nbytes for member in members)


def assemble(
    group: Group, tensors: Mapping[str, torch.Tensor], loader: Loader, table: LiveTable
) -> dict[str, torch.Tensor | Packed]:
    """Put the checkpoint tensors of one whole group into runtime layout; return the runtime tensors by slot.

    Raises:
        IncompatibleModel: tied tensors disagree, or the result does not fit its slot.
    """
    made: dict[str, torch.Tensor | Packed] = {}
    origin: dict[str, str] = {}
    for part in group.parts:
        built = loader.build(part, {name: tensors[name] for name in part.sources})
        for target, value in built.items():
            slot = table.home_of(target)
            ready = value if isinstance(value, Packed) else table.check(target, value)
            if slot in made and not _same(made[slot], ready):
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


def _same(one: torch.Tensor | Packed, other: torch.Tensor | Packed) -> bool:
    if isinstance(one, Packed) or isinstance(other, Packed):
        return isinstance(one, Packed) and isinstance(other, Packed) and one.sha256 == other.sha256
    return same_bytes(one, other)


def held_of(
    whole: Mapping[str, torch.Tensor], loader: Loader, place: Place = HOST
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what this process holds of proven checkpoint tensors, and the hashes of those that are slices.

    A slice is known by the hash it has here, taken from bytes whose whole hash has just been proven.
    """
    held = {name: loader.slice(name, tensor) for name, tensor in whole.items()}
    return held, {name: sha256_of(tensor, place) for name, tensor in held.items() if tensor is not whole[name]}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors of one shape and dtype are the same byte for byte; compared where they are."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
