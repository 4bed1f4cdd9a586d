"""The weights core on a module with every kind of loading rule: live bytes are always exactly one version's."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from modelswap_engine.backends.port import StageRetained
from modelswap_engine.protocol.errors import (
    Busy,
    Cancelled,
    ChecksFailed,
    IncompatibleModel,
    ManifestMismatch,
    ModelswapError,
    NotFound,
    SourceUnreadable,
)

pytestmark = pytest.mark.model

_GROUPS = (("embed",), ("q", "k", "v"), ("gate_up",), ("out",), ("scale",), ("norm",), ("steps",))
_ACTIONS = st.one_of(
    st.tuples(st.just("swap"), st.sets(st.sampled_from(_GROUPS), min_size=1), st.integers(0, 2**31)),
    st.tuples(st.just("undone"), st.sets(st.sampled_from(_GROUPS), min_size=1), st.integers(0, 2**31)),
    st.tuples(st.just("torn"), st.sets(st.sampled_from(_GROUPS), min_size=1), st.integers(0, 2**31)),
    st.tuples(st.just("staged"), st.sets(st.sampled_from(_GROUPS), min_size=1), st.integers(0, 2**31)),
    st.tuples(st.just("damaged"), st.sets(st.sampled_from(_GROUPS), min_size=1), st.integers(0, 2**31)),
    st.tuples(st.just("back"), st.just(frozenset()), st.just(0)),
)


class _Bench:
    """A live module, the version it should hold, and the retained one."""

    def __init__(self, folder: Path, *, method: str = "pointer") -> None:
        from modelswap_engine.weights.updater import WeightUpdater
        from modelswap_engine.weights.version import Method
        from tests.support import weights_lab as lab

        self.lab, self.folder, self.numbers = lab, folder, itertools.count()
        self.tear = False
        self.live = self.write(lab.random_tensors(1, lab.SOURCES))
        self.previous = None
        self.module = lab.fill(lab.LabModule(), self.live)
        self.method = Method(method)
        self.updater = WeightUpdater(
            self.module,
            lab.LabLoader(),
            digest=self.live.digest,
            checkpoint=self.live.ranges,
            midway=self._midway,
            method=lambda: self.method,
        )
        self.updater.prove()
        self.places = self.where()

    def where(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.module.state_dict().items()}

    def _midway(self) -> None:
        if self.tear:
            self.tear = False
            raise RuntimeError("torn")

    def write(self, tensors):
        return self.lab.write_version(self.folder / f"{next(self.numbers)}.bin", tensors)

    def next_version(self, groups, seed: int):
        names = [name for group in groups for name in group]
        return self.write({**self.live.tensors, **self.lab.random_tensors(seed, names)}), names

    def stage(self, version, names, operation: str, **options) -> None:
        from modelswap_engine.weights.pace import Pace

        self.updater.stage(version.order(operation, names, **options), lambda read: read(Pace()))

    def check(self) -> None:
        fresh = self.lab.fill(self.lab.LabModule(), self.live)
        assert self.lab.state_bytes(self.module.state_dict()) == self.lab.state_bytes(fresh.state_dict())
        assert self.module.head is self.module.embed
        assert self.module.alias.data_ptr() == self.module.norm.data_ptr()
        assert self.updater.verify(strict=True) == self.live.digest
        hashes, _ = self.updater.hash(self.updater.snapshot(), self.updater.groups)
        assert hashes == self.live.hashes()
        if self.method == "copy":
            assert self.where() == self.places


@pytest.fixture
def bench(tmp_path: Path) -> _Bench:
    return _Bench(tmp_path)


@pytest.fixture
def copying(tmp_path: Path) -> _Bench:
    return _Bench(tmp_path, method="copy")


def _apply(bench: _Bench, action: str, groups, seed: int) -> None:
    operation = f"op{next(bench.numbers)}"
    if action == "back":
        if bench.previous is None:
            return
        bench.updater.stage_retained(StageRetained(operation_id=operation, digest=bench.previous.digest, directory=""))
        bench.updater.prepare(operation)
        bench.updater.commit(operation)
        bench.updater.release(operation, previous=False)
        bench.live, bench.previous = bench.previous, bench.live
        return
    version, names = bench.next_version(groups, seed)
    if action == "damaged":
        path = Path(version.ranges[0].path)
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        with pytest.raises(ModelswapError):
            bench.stage(version, names, operation)
        return
    bench.stage(version, names, operation)
    bench.updater.prepare(operation)
    if action == "staged":
        bench.updater.release(operation, previous=False)
        return
    if action == "torn":
        bench.tear = True
        with pytest.raises(RuntimeError):
            bench.updater.commit(operation)
    else:
        bench.updater.commit(operation)
    if action in {"torn", "undone"}:
        bench.updater.rollback(operation)
        bench.updater.release(operation, previous=False)
        return
    bench.updater.release(operation, previous=False)
    bench.live, bench.previous = version, bench.live


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(actions=st.lists(_ACTIONS, min_size=1, max_size=6), method=st.sampled_from(["pointer", "copy"]))
def test_any_history_leaves_exactly_one_version_live(tmp_path_factory: pytest.TempPathFactory, actions, method) -> None:
    bench = _Bench(tmp_path_factory.mktemp("lab"), method=method)
    for action, groups, seed in actions:
        _apply(bench, action, groups, seed)
        bench.check()


@pytest.mark.parametrize("failure", ["undone", "torn"])
def test_after_a_rollback_the_version_retained_before_is_retained_again(bench: _Bench, failure: str) -> None:
    first = bench.live
    _apply(bench, "swap", [("q", "k", "v"), ("norm",)], 1)
    _apply(bench, failure, [("norm",), ("embed",)], 2)
    _apply(bench, "back", [], 0)
    assert bench.live is first
    bench.check()


def test_a_released_commit_cannot_be_undone_and_one_that_never_was_needs_no_undoing(bench: _Bench) -> None:
    version, names = bench.next_version([("out",)], 4)
    bench.stage(version, names, "one")
    bench.updater.rollback("one")
    bench.updater.rollback("never")
    bench.check()
    bench.updater.prepare("one")
    bench.updater.commit("one")
    with pytest.raises(Busy):
        bench.updater.rollback("another")
    bench.updater.release("one", previous=False)
    with pytest.raises(Busy):
        bench.updater.rollback("one")
    bench.live = version
    bench.check()


def test_a_swap_that_never_committed_is_undone_by_nothing_also_after_another_swap(bench: _Bench) -> None:
    _apply(bench, "swap", [("norm",)], 1)
    first, names = bench.next_version([("out",)], 2)
    bench.stage(first, names, "one")
    bench.updater.prepare("one")
    bench.updater.commit("one")
    # Nobody releases the first one; the second one ends between pause and commit.
    bench.live = first
    second, names = bench.next_version([("embed",), ("out",)], 3)
    bench.stage(second, names, "two")
    bench.updater.rollback("two")
    bench.updater.prepare("two")
    bench.updater.rollback("two")
    bench.check()
    with pytest.raises(Busy):
        bench.updater.rollback("one")
    bench.updater.commit("two")
    bench.live = second
    bench.check()
    bench.updater.rollback("two")
    bench.live = first
    bench.check()


def _swap_all(bench: _Bench, seeds: Iterable[int]) -> list[Any]:
    """Swap all tensors once per seed; return weak references to the memory of ``out`` in every version."""
    from torch.multiprocessing.reductions import StorageWeakRef

    stored = [StorageWeakRef(bench.module.out.untyped_storage())]
    for seed in seeds:
        _apply(bench, "swap", _GROUPS, seed)
        stored.append(StorageWeakRef(bench.module.out.untyped_storage()))
    return stored


def test_after_two_swaps_memory_holds_the_live_and_one_previous_version(bench: _Bench) -> None:
    stored = _swap_all(bench, (1, 2))
    assert [item.expired() for item in stored] == [True, False, False]
    sizes = bench.updater.sizes()
    assert sizes.previous == sizes.live


@pytest.mark.parametrize("method", ["pointer", "copy"])
def test_a_version_that_came_back_is_not_counted_twice(tmp_path: Path, method: str) -> None:
    bench = _Bench(tmp_path, method=method)
    _apply(bench, "swap", _GROUPS, 1)
    live = bench.updater.sizes().live
    bench.updater.stage_retained(StageRetained(operation_id="back", digest=bench.previous.digest, directory=""))
    assert bench.updater.sizes().previous == live
    bench.updater.prepare("back")
    bench.updater.commit("back")
    # What can undo it is still there: the version that was left. A copy of what came back is memory of its own.
    assert bench.updater.sizes().previous == (live if method == "pointer" else 2 * live)
    bench.updater.release("back", previous=False)
    sizes = bench.updater.sizes()
    assert (sizes.live, sizes.staged, sizes.previous) == (live, 0, live)


def test_copied_in_place_those_who_hold_addresses_see_the_new_values(copying: _Bench) -> None:
    """Captured graphs and compiled code know memory, not parameters; these tensors stand for them."""
    captured = {name: tensor.detach() for name, tensor in copying.module.state_dict().items()}
    first = copying.live
    version, names = copying.next_version(_GROUPS, 3)
    copying.stage(version, names, "one")
    copying.updater.prepare("one")
    assert copying.updater.sizes().staged == 2 * copying.updater.sizes().live  # the new values, and the old ones saved
    assert copying.updater.commit("one") == "copy"
    copying.live = version
    copying.check()
    assert copying.lab.state_bytes(captured) == copying.lab.state_bytes(copying.module.state_dict())
    assert copying.updater.rollback("one") == "copy"
    copying.live = first
    copying.check()
    assert copying.lab.state_bytes(captured) == copying.lab.state_bytes(copying.module.state_dict())


def test_a_copy_that_did_not_arrive_is_seen_without_hashing(copying: _Bench) -> None:
    version, names = copying.next_version([("out",)], 3)
    copying.stage(version, names, "one")
    copying.updater.prepare("one")
    copying.updater.commit("one")
    copying.module.out.data[0, 0] += 1
    with pytest.raises(ModelswapError, match="out does not hold what was copied"):
        copying.updater.verify(strict=False)
    copying.updater.rollback("one")
    copying.check()


def test_the_way_may_change_between_two_swaps(bench: _Bench) -> None:
    """A model that is compiled later is copied into from then on, also when the retained version was pointed to."""
    _apply(bench, "swap", _GROUPS, 1)
    bench.method, bench.places = type(bench.method)("copy"), bench.where()
    _apply(bench, "back", [], 0)
    bench.check()
    _apply(bench, "torn", _GROUPS, 2)
    bench.check()


def test_dropping_the_previous_version_makes_room_before_anything_is_read(bench: _Bench) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    from modelswap_engine.weights.pace import Pace

    stored = _swap_all(bench, (1,))
    version, names = bench.next_version(_GROUPS, 2)
    bench.stage(version, names, "two")
    bench.updater.prepare("two")
    bench.updater.commit("two")
    stored.append(StorageWeakRef(bench.module.out.untyped_storage()))
    # The second swap was not released, and could be undone: it keeps three versions in memory.
    assert [item.expired() for item in stored] == [False, False, False]
    bench.live = version
    version, names = bench.next_version([("norm",)], 3)

    def read(work):
        assert [item.expired() for item in stored] == [True, True, False]
        return work(Pace())

    bench.updater.stage(replace(version.order("three", names), drop_previous=True), read)
    assert bench.updater.sizes().previous == 0
    bench.check()


def test_a_link_or_a_pipe_in_place_of_a_file_is_not_read(bench: _Bench) -> None:
    version, names = bench.next_version([("norm",)], 1)
    path = Path(version.ranges[0].path)
    kept = path.rename(path.with_suffix(".kept"))
    path.symlink_to(kept)
    with pytest.raises(SourceUnreadable, match=path.name):
        bench.stage(version, names, "link")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SourceUnreadable, match="not a regular file"):
        bench.stage(version, names, "pipe")
    bench.check()


def test_hashing_stops_between_tensors(bench: _Bench) -> None:
    from modelswap_engine.weights.pace import Pace

    pace = Pace()
    pace.cancel()
    with pytest.raises(Cancelled):
        bench.updater.hash(bench.updater.snapshot(), bench.updater.groups, pace=pace)


def test_half_a_fused_parameter_is_refused(bench: _Bench) -> None:
    version, _ = bench.next_version([("q", "k", "v")], 7)
    with pytest.raises(IncompatibleModel, match="tensor k is missing"):
        bench.stage(version, ["q", "v"], "op")
    bench.check()


def test_a_value_that_is_not_finite_is_refused_by_name(bench: _Bench) -> None:
    broken = bench.live.tensors["norm"].clone()
    broken[2] = float("nan")
    version = bench.write({**bench.live.tensors, "norm": broken})
    with pytest.raises(ChecksFailed, match="norm"):
        bench.stage(version, ["norm"], "op")
    bench.check()


def test_strict_verification_sees_one_changed_byte_of_live_memory(bench: _Bench) -> None:
    bench.module.qkv.data[0, 0] += 1
    assert bench.updater.verify(strict=False) == bench.live.digest
    with pytest.raises(ManifestMismatch, match="tensor q "):
        bench.updater.verify(strict=True)


def test_verification_sees_a_parameter_that_points_elsewhere(bench: _Bench) -> None:
    bench.module.out.data = bench.module.out.data.clone()
    with pytest.raises(ModelswapError, match="out"):
        bench.updater.verify(strict=False)


def test_released_versions_free_their_memory(bench: _Bench) -> None:
    version, names = bench.next_version(_GROUPS, 3)
    bench.stage(version, names, "one", keep_previous=False)
    assert bench.updater.sizes().staged > 0
    bench.updater.prepare("one")
    bench.updater.commit("one")
    assert bench.updater.sizes().staged == 0
    assert bench.updater.sizes().previous > 0
    bench.updater.release("one", previous=False)
    assert bench.updater.sizes().previous == 0
    with pytest.raises(NotFound):
        bench.updater.stage_retained(StageRetained(operation_id="two", digest=bench.live.digest, directory=""))


def test_a_checkpoint_that_leaves_a_parameter_empty_is_refused(bench: _Bench) -> None:
    from modelswap_engine.weights.updater import WeightUpdater

    partial = [item for item in bench.live.ranges if item.name != "norm"]
    with pytest.raises(IncompatibleModel, match="norm"):
        WeightUpdater(bench.module, bench.lab.LabLoader(), digest="d", checkpoint=partial)
