"""Counting by layer and kind loses no tensor and no byte, whatever tensors are called."""

from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.checkpoint.diff import diff
from modelswap_engine.checkpoint.grid import FAMILIES, make_grid, total
from modelswap_engine.checkpoint.groups import usual_groups
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry, make_manifest

PART = st.sampled_from(
    ["model", "layers", "0", "7", "12", "experts", "q_proj", "up_proj", "norm", "weight", "bias", ""]
)
NAMES = st.lists(PART, min_size=1, max_size=7).map(".".join)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    sizes = draw(st.dictionaries(NAMES, st.tuples(st.integers(0, 9), st.sampled_from("ab")), max_size=12))
    tensors = {
        name: TensorEntry(name=name, dtype="U8", shape=(size,), nbytes=size, file="f", offset=0, sha256=mark * 64)
        for name, (size, mark) in sizes.items()
    }
    return make_manifest(tensors, {}, architecture="")


@given(old=manifests(), new=manifests())
def test_the_cells_add_up_to_the_difference(old: Manifest, new: Manifest) -> None:
    found = diff(old, new)
    grid = make_grid(old, new, found)
    whole = total(grid.cells.values())
    union = {**old.by_name, **new.by_name}
    foreign = {*found.added, *found.removed, *found.reshaped, *found.retyped}
    assert (whole.tensors, whole.nbytes) == (len(union), sum(entry.nbytes for entry in union.values()))
    assert whole.changed == len(foreign | set(found.changed))
    assert whole.foreign == len(foreign)
    assert whole == total(grid.row(row) for row in grid.rows)
    assert all(0 <= count.share <= 1 for count in grid.cells.values())
    order = [FAMILIES.index(kind.family) for kind in grid.kinds]
    assert order == sorted(order)
    assert [row.layer for row in grid.rows if not row.stack] == sorted(row.layer for row in grid.rows if not row.stack)


@given(names=st.sets(NAMES))
def test_every_tensor_is_in_one_usual_group(names: set[str]) -> None:
    members = [name for group in usual_groups(sorted(names)).values() for name in group]
    assert sorted(members) == sorted(names)
