"""What differs between two manifests by layer and kind of tensor: the values of a table or of a heat map. Pure.

Rows are layers, columns kinds of tensor (``places.py``). A tensor has changed or has not: how much of its bytes
differ is not in a manifest, so a changed tensor counts with all of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from modelswap_engine.checkpoint.diff import Diff
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.checkpoint.places import Place, place

ATTENTION, MLP, NORMS, OTHER, OUTSIDE = FAMILIES = ("attention", "mlp", "norms", "other", "outside layers")
"""Families of kinds, in the order in which they are shown."""

_ORDER: Final = {
    leaf: number
    for number, leaf in enumerate(
        (
            "embed_tokens", "wte", "q_proj", "q_a_proj", "q_b_proj", "query", "k_proj", "key", "kv_a_proj_with_mqa",
            "kv_b_proj", "v_proj", "value", "qkv_proj", "c_attn", "o_proj", "out_proj", "gate", "router", "gate_proj",
            "w1", "up_proj", "w3", "gate_up_proj", "down_proj", "w2",
        )
    )
}  # fmt: skip
_LAST: Final = len(_ORDER)


@dataclass(frozen=True, kw_only=True)
class Count:
    """Tensors and their bytes, all and those that differ.

    Attributes:
        foreign: how many of those that differ are in one checkpoint only, or have another shape or dtype.
    """

    tensors: int = 0
    changed: int = 0
    nbytes: int = 0
    changed_bytes: int = 0
    foreign: int = 0

    @property
    def share(self) -> float:
        """Which part of the bytes lies in tensors that differ, 0 to 1."""
        if self.nbytes == 0:
            return 1.0 if self.changed else 0.0
        return self.changed_bytes / self.nbytes

    def __add__(self, other: "Count") -> "Count":
        return Count(
            tensors=self.tensors + other.tensors,
            changed=self.changed + other.changed,
            nbytes=self.nbytes + other.nbytes,
            changed_bytes=self.changed_bytes + other.changed_bytes,
            foreign=self.foreign + other.foreign,
        )


@dataclass(frozen=True, order=True)
class Row:
    """A layer of a stack; the row of what is in no layer has number -1 and sorts first."""

    stack: str
    layer: int

    @property
    def label(self) -> str:
        """Its name in a table."""
        return f"{self.stack}.{self.layer}".lstrip(".") if self.layer >= 0 else OUTSIDE


@dataclass(frozen=True)
class Kind:
    """A column."""

    name: str
    family: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows and columns in the order in which they are shown; a kind that a layer has not has no cell."""

    rows: tuple[Row, ...]
    kinds: tuple[Kind, ...]
    cells: Mapping[tuple[Row, Kind], Count]

    def row(self, row: Row) -> Count:
        """Count a whole layer."""
        return total(self.cells[row, kind] for kind in self.kinds if (row, kind) in self.cells)

    def kinds_of(self, row: Row) -> Iterator[tuple[Kind, Count]]:
        """Return what a layer has, in the order of the columns."""
        return ((kind, self.cells[row, kind]) for kind in self.kinds if (row, kind) in self.cells)


def total(counts: Iterable[Count]) -> Count:
    """Add counts up."""
    return sum(counts, Count())


def make_grid(old: Manifest, new: Manifest, found: Diff) -> Grid:
    """Count every tensor of either manifest; one that is in both counts with its bytes in ``new``."""
    foreign = {*found.added, *found.removed, *found.reshaped, *found.retyped}
    changed = foreign.union(found.changed)
    cells: dict[tuple[Row, Kind], Count] = {}
    for name, entry in {**old.by_name, **new.by_name}.items():
        at = _cell(place(name))
        differs = name in changed
        cells[at] = cells.get(at, Count()) + Count(
            tensors=1,
            changed=int(differs),
            nbytes=entry.nbytes,
            changed_bytes=entry.nbytes if differs else 0,
            foreign=int(name in foreign),
        )
    rows, kinds = {row for row, _ in cells}, {kind for _, kind in cells}
    return Grid(rows=tuple(sorted(rows)), kinds=tuple(sorted(kinds, key=_by_family)), cells=cells)


def _cell(where: Place) -> tuple[Row, Kind]:
    family = OUTSIDE if where.layer < 0 else _family(where.kind)
    return Row(where.stack, where.layer), Kind(where.kind, family)


def _family(kind: str) -> str:
    text = kind.lower()
    leaf = text.rpartition(".")[2]
    if "norm" in leaf or leaf.startswith("ln"):
        return NORMS
    if "attn" in text or "attention" in text:
        return ATTENTION
    return MLP if any(word in text for word in ("mlp", "expert", "moe", "ffn", "feed_forward")) else OTHER


def _by_family(kind: Kind) -> tuple[int, str, int, str]:
    parent, _, leaf = kind.name.rpartition(".")
    known = _ORDER.get(leaf, _LAST)
    return (FAMILIES.index(kind.family), parent if kind.family != OUTSIDE else "", known, leaf)
