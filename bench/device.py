"""A device without an engine: copies through the product's buffers, checksums, values copied in place under a graph.

Everything goes through the weights core as it is used in service. The device comes in as a place, and capturing a graph
as a function, so that all but the graph itself also runs where there is only a CPU.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from modelswap_engine.backends.port import Stage, TensorRange
from modelswap_engine.weights.hashing import hash_tensors
from modelswap_engine.weights.mapping import Part
from modelswap_engine.weights.pace import Pace, cores
from modelswap_engine.weights.place import Place
from modelswap_engine.weights.reader import read_all
from modelswap_engine.weights.stage import same_bytes
from modelswap_engine.weights.updater import WeightUpdater
from modelswap_engine.weights.version import Method

_WIDTH: Final = 1024
_LAYERS: Final = 16

Capture = Callable[[torch.nn.Module, torch.Tensor], tuple[torch.Tensor, Callable[[], object]]]
"""Given a module and its input: the tensor that its output is written into, and what computes it anew."""


class CopyRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Bytes per second of one thread, the best of some turns: in pieces through buffers, and as one plain copy."""

    nbytes: int
    pieces_to_device: float
    pieces_to_host: float
    plain_to_device: float
    plain_to_host: float


class EqualRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Bytes per second, the best of some turns: SHA-256 on all cores of what is copied back, and compared in place."""

    nbytes: int
    cores: int
    sha256: float
    equal: float


class GraphRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a captured graph makes of new weights.

    Attributes:
        nbytes: of the weights.
        replays_new: copied in place, the graph computes with the new ones.
        addresses_kept: copied in place, no address changed.
        pointers_unnoticed: where pointers moved instead, the graph went on with the old ones.
        copy_microseconds: the copies until the device had done them, and ``pointer_microseconds`` the pointers.
    """

    nbytes: int
    replays_new: bool
    addresses_kept: bool
    pointers_unnoticed: bool
    copy_microseconds: float
    pointer_microseconds: float


def copy_speeds(place: Place, *, nbytes: int, turns: int) -> CopyRow:
    """Copy there and back."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    held = source.to(place.device, copy=True)
    moves: tuple[Callable[[], object], ...] = (
        lambda: _send(place, source),
        lambda: [len(piece) for piece in place.pieces(held)],
        lambda: held.copy_(source),
        lambda: source.copy_(held),
    )
    best = [max(nbytes / _timed(place, move) for _ in range(turns)) for move in moves]
    return CopyRow(
        nbytes=nbytes,
        pieces_to_device=best[0],
        pieces_to_host=best[1],
        plain_to_device=best[2],
        plain_to_host=best[3],
    )


def _send(place: Place, source: torch.Tensor) -> torch.Tensor:
    view = source.numpy().data
    with place.landing(len(source)) as landing:
        for begin in range(0, len(source), landing.piece):
            end = min(begin + landing.piece, len(source))
            landing.window(begin, end)[:] = view[begin:end]
            landing.land()
        return landing.tensor()


def equality_speeds(place: Place, *, nbytes: int, turns: int) -> EqualRow:
    """Hash on the host and compare on the device."""
    count = cores()
    tensors = {str(number): torch.randint(0, 256, (nbytes // count,), dtype=torch.uint8) for number in range(count)}
    held = {name: tensor.to(place.device, copy=True) for name, tensor in tensors.items()}
    other = {name: tensor.clone() for name, tensor in held.items()}
    if not all(same_bytes(held[name], other[name]) for name in held):
        raise RuntimeError("the device says that equal bytes differ")
    size = nbytes // count * count
    return EqualRow(
        nbytes=size,
        cores=count,
        sha256=max(size / _timed(place, lambda: hash_tensors(held, place=place)) for _ in range(turns)),
        equal=max(
            size / _timed(place, lambda: [same_bytes(held[name], other[name]) for name in held]) for _ in range(turns)
        ),
    )


def _timed(place: Place, work: Callable[[], object]) -> float:
    place.quiesce()
    started = time.perf_counter()
    work()
    place.settle()
    place.quiesce()
    return time.perf_counter() - started


class _Plain:
    """Loading rules of a module whose parameters are the checkpoint's tensors."""

    def plan(self, checkpoint: Mapping[str, torch.Tensor]) -> Sequence[Part]:
        return [Part(sources=(name,), targets=(name,)) for name in checkpoint]

    def slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def build(self, part: Part, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {part.targets[0]: tensors[part.sources[0]]}

    def export(self, part: Part, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {part.sources[0]: live[part.targets[0]]}


def graph_in_place(place: Place, *, capture: Capture, width: int = _WIDTH) -> GraphRow:
    """Capture a module, change its weights in both ways, and look at what the graph computes."""
    with tempfile.TemporaryDirectory(prefix="modelswap-bench-") as folder:
        old, new = (_write(Path(folder) / f"{seed}.bin", width, seed=seed) for seed in (0, 1))
        module = _module(width, read_all(old, pace=Pace(), place=place))
        method = [Method.COPY]
        updater = WeightUpdater(module, _Plain(), digest="old", checkpoint=old, method=lambda: method[0], place=place)
        written, replay = capture(module, torch.ones(8, width, dtype=torch.bfloat16, device=place.device))

        def computed() -> torch.Tensor:
            replay()
            place.quiesce()
            return written.clone()

        before, addresses = computed(), _addresses(module)
        copying = _swap(updater, place, new, "new")
        after, kept = computed(), _addresses(module) == addresses
        wanted = _module(width, read_all(new, pace=Pace(), place=place))(
            torch.ones(8, width, dtype=torch.bfloat16, device=place.device)
        )
        method[0] = Method.POINTER
        pointing = _swap(updater, place, old, "old")
        return GraphRow(
            nbytes=sum(item.nbytes for item in old),
            replays_new=torch.allclose(after, wanted, rtol=1e-2) and not torch.allclose(after, before, rtol=1e-2),
            addresses_kept=kept,
            pointers_unnoticed=torch.equal(computed(), after),
            copy_microseconds=1e6 * copying,
            pointer_microseconds=1e6 * pointing,
        )


def _swap(updater: WeightUpdater, place: Place, tensors: Sequence[TensorRange], digest: str) -> float:
    """Swap; return the seconds from the first assignment until the device has done all of them."""
    order = Stage(operation_id=digest, digest=digest, directory="", tensors=tuple(tensors))
    updater.stage(order, lambda read: read(Pace()))
    updater.prepare(digest)
    place.quiesce()
    started = time.perf_counter()
    updater.commit(digest)
    place.quiesce()
    seconds = time.perf_counter() - started
    updater.verify(strict=True)
    return seconds


def _write(path: Path, width: int, *, seed: int) -> list[TensorRange]:
    random = torch.Generator().manual_seed(seed)
    ranges, offset = list[TensorRange](), 0
    with path.open("wb") as file:
        for number in range(_LAYERS):
            tensor = torch.randn((width, width), generator=random).mul_(width**-0.5).to(torch.bfloat16)
            data = tensor.view(torch.uint8).numpy().tobytes()
            ranges.append(
                TensorRange(
                    name=f"{number}.weight",
                    dtype="BF16",
                    shape=(width, width),
                    path=str(path),
                    offset=offset,
                    nbytes=len(data),
                    sha256=hashlib.sha256(data).hexdigest(),
                )
            )
            file.write(data)
            offset += len(data)
    return ranges


def _module(width: int, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    layers = [torch.nn.Linear(width, width, bias=False, device="meta", dtype=torch.bfloat16) for _ in range(_LAYERS)]
    module = torch.nn.Sequential(*layers).requires_grad_(False)
    module.load_state_dict(dict(tensors), assign=True)
    return module


def _addresses(module: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters()]
