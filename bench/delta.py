"""Packs of single elements that changed: how small, and how fast tensors are made from them.

Weights in bf16 of the usual spread: some of them replaced by others at random, all of them trained on (of each the
same small step, which moves most of them by little), or taken for words of packed weights of four bits, a tenth of
which are others. Files that the system has in memory. Making a tensor is measured apart from proving it: what the
machine can hash bounds the second whatever the first does. What copying and SHA-256 can reach is measured with the same
bytes in the same run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from bench.raw import raw_speed
from bench.turns import Budget
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint import files
from modelswap_engine.checkpoint.build import hash_contents
from modelswap_engine.checkpoint.layout import SINGLE_FILE, read_contents
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.checkpoint.saving import compose_header
from modelswap_engine.delta.build import build_pack
from modelswap_engine.delta.local import Folder, opened_pack
from modelswap_engine.delta.pack import ReadBase, Step, apply, pieces

_TENSORS: Final = 16
_ELEMENTS: Final = 1 << 24
Words = npt.NDArray[np.uint16]
Change = Callable[[Words, np.random.Generator], Words]


def _replaced(share: float) -> Change:
    def change(weights: Words, random: np.random.Generator) -> Words:
        where = np.flatnonzero(random.random(len(weights), np.float32) < share)
        weights[where] = random.integers(0, 1 << 16, len(where), np.uint16)
        return weights

    return change


def _trained(weights: Words, random: np.random.Generator) -> Words:
    # What lies below the bits that bf16 keeps is where the optimizer's own copy of a weight is within its step.
    exact = (weights.astype(np.uint32) << 16) | random.integers(0, 1 << 16, len(weights), np.uint32)
    moved = exact.view(np.float32) + np.float32(1e-4) * random.standard_normal(len(weights), np.float32)
    return (moved.view(np.uint32) >> 16).astype(np.uint16)


def _requantized(weights: Words, random: np.random.Generator) -> Words:
    for shift in range(0, 16, 4):
        where = np.flatnonzero(random.random(len(weights), np.float32) < 0.1)
        weights[where] ^= random.integers(1, 16, len(where), np.uint16) << np.uint16(shift)
    return weights


CHANGES: Final[Mapping[str, Change]] = {
    "1 % replaced": _replaced(0.01),
    "3 % replaced": _replaced(0.03),
    "fully fine-tuned": _trained,
    "10 % of 4-bit weights": _requantized,
}


class DeltaRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One kind of change; speeds of all cores in bytes of the new version per second, the best of the turns.

    Attributes:
        change: one of :data:`CHANGES`.
        share: of the elements that are others.
        nbytes: of all tensors; each of them changed.
        pack_bytes: of the whole pack.
        build: reading and hashing both versions, and packing.
        make: reading the old version and the pack, and making tensors in memory.
        prove: the same, hashed.
        copy: reading the old version only.
        sha256: hashing only.
    """

    change: str
    share: float
    nbytes: int
    pack_bytes: int
    build: float
    make: float
    prove: float
    copy: float
    sha256: float
    cores: int
    turns: int

    @property
    def ratio(self) -> float:
        """How many times smaller the pack is."""
        return self.nbytes / self.pack_bytes

    @property
    def on_two_cores(self) -> float:
        """Speed of making tensors that two cores have, in bytes per second."""
        return 2 * self.make / self.cores


def measure_delta(budget: Budget, *, turns: int, elements: int = _ELEMENTS) -> list[DeltaRow]:
    """Build and use a pack for each kind of change."""
    with tempfile.TemporaryDirectory(prefix="modelswap-delta-") as name:
        place = Path(name)
        base = _folder(place / "base", lambda weights, _: weights, elements=elements)
        return [_measure(place, base, change, budget=budget, turns=turns, elements=elements) for change in CHANGES]


def _measure(place: Path, base: Folder, change: str, *, budget: Budget, turns: int, elements: int) -> DeltaRow:
    target, path = _folder(place / change, CHANGES[change], elements=elements), place / f"{change}.delta"
    started = time.perf_counter()
    header = build_pack(base, target, path)
    nbytes = target.manifest.total_bytes
    build = nbytes / (time.perf_counter() - started)
    ranges = [_range(base, entry) for entry in base.manifest.tensors]
    make = prove = copy = sha256 = 0.0
    cores, done = 1, 0
    with opened_pack(path) as pack, base.opened(pack.entries) as opened:

        def of(entry: TensorEntry) -> tuple[list[Step], ReadBase]:
            file = opened[entry.file]
            read: ReadBase = lambda begin, view: files.read_into(file, entry.offset + begin, view)  # noqa: E731
            return [Step(pack, pack.entries[entry.name])], read

        def made(entry: TensorEntry) -> None:
            steps, read = of(entry)
            for _ in pieces(steps, base=read):
                pass

        def proved(entry: TensorEntry) -> None:
            steps, read = of(entry)
            apply(steps, base=read, write=len)

        for turn in budget.turns(most=turns, seconds=30.0):
            raw = raw_speed(ranges)
            cores, done = raw.cores, turn + 1
            copy, sha256 = max(copy, raw.copy), max(sha256, raw.sha256)
            make = max(make, nbytes / _seconds(made, base.manifest.tensors, cores))
            prove = max(prove, nbytes / _seconds(proved, base.manifest.tensors, cores))
    return DeltaRow(
        change=change,
        share=sum(entry.changed for entry in header.tensors) / (_TENSORS * elements),
        nbytes=nbytes,
        pack_bytes=path.stat().st_size,
        build=build,
        make=make,
        prove=prove,
        copy=copy,
        sha256=sha256,
        cores=cores,
        turns=done,
    )


def _seconds(work: Callable[[TensorEntry], None], entries: Sequence[TensorEntry], threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        for _ in pool.map(work, entries):
            pass
        return time.perf_counter() - started


def _range(folder: Folder, entry: TensorEntry) -> TensorRange:
    return TensorRange(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        path=str(folder.contents.directory / entry.file),
        offset=entry.offset,
        nbytes=entry.nbytes,
        sha256=entry.sha256,
    )


def _folder(place: Path, change: Change, *, elements: int) -> Folder:
    """Write a checkpoint whose tensors are always the same, but for the change."""
    place.mkdir()
    entries = [
        TensorEntry(
            name=f"{number:02}", dtype="BF16", shape=(elements,), nbytes=2 * elements, file=SINGLE_FILE, offset=0
        )
        for number in range(_TENSORS)
    ]
    weights = _weights(np.random.default_rng(0), elements)
    random = np.random.default_rng(1)
    with (place / SINGLE_FILE).open("wb") as file:
        file.write(compose_header(entries))
        for number in range(_TENSORS):
            file.write(change(weights ^ np.uint16(number), random).data)
    roots = (place.resolve(),)
    contents = read_contents(roots[0], roots=roots)
    return Folder(contents=contents, manifest=hash_contents(contents, roots=roots), roots=roots)


def _weights(random: np.random.Generator, elements: int) -> Words:
    values = random.standard_normal(elements, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
