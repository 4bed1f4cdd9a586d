"""Any diff of any architecture ends bit-equal to a fresh load, through transformers' own loading rules.

In this process, without an engine around it: the rules and the weights core are the same as in a worker.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelswap_engine.backends.port import StageRetained
from modelswap_engine.protocol.errors import IncompatibleModel, ModelswapError
from tests.support.orders import digest_of, hashes_of, ranges, stage_order

pytestmark = pytest.mark.model

_FAMILIES = (
    "llama", "llama, sharded", "llama, other norms", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "mixtral", "qwen3-moe",
)  # fmt: skip
_DTYPES = ("float32", "bfloat16", "float16")
_ENDS = ("kept", "undone", "dropped", "back")
_STEPS = st.lists(
    st.tuples(st.sampled_from(_ENDS), st.sets(st.integers(0, 99), min_size=1, max_size=4), st.integers(0, 2**31)),
    min_size=1,
    max_size=3,
)


class Live:
    """A model in this process, and the checkpoint that it must be."""

    def __init__(self, directory: Path) -> None:
        from modelswap_engine.backends.embedded.loading import TransformersLoader
        from modelswap_engine.weights.updater import WeightUpdater

        self.directory = directory
        self.model = build(directory)
        self.updater = WeightUpdater(
            self.model, TransformersLoader(self.model), digest=digest_of(directory), checkpoint=ranges(directory)
        )
        self.updater.prove()

    def stage(self, new: Path, operation: str, *, whole_groups: bool = True) -> None:
        from modelswap_engine.weights.pace import Pace

        groups = [group.sources for group in self.updater.groups] if whole_groups else []
        order = stage_order(self.directory, new, operation_id=operation, groups=groups)
        self.updater.stage(order, lambda work: work(Pace()))

    def commit(self, operation: str) -> None:
        self.updater.prepare(operation)
        self.updater.commit(operation)

    def assert_is(self, directory: Path) -> None:
        """Everything a fresh load has, byte for byte and tied the same way; and the proof agrees."""
        fresh = build(directory).state_dict(keep_vars=True)
        held = self.model.state_dict(keep_vars=True)
        assert list(held) == list(fresh)
        for name, tensor in fresh.items():
            assert (held[name].dtype, held[name].shape) == (tensor.dtype, tensor.shape), name
            assert raw(held[name]) == raw(tensor), name
        assert shared(held) == shared(fresh)
        assert self.updater.verify(strict=True) == digest_of(directory)
        snapshot, groups, blind = self.updater.snapshot(), self.updater.groups, self.updater.unverifiable
        hashes, _ = self.updater.hash(snapshot, groups)
        for name, wanted in hashes_of(directory).items():
            assert name in blind or hashes[name] == wanted
        runtime = self.updater.runtime(snapshot, groups)
        assert {name for item in runtime for name in item.sources} == blind
        assert all(item.actual == item.expected for item in runtime)


def build(directory: Path) -> Any:
    from modelswap_engine.backends.embedded import loading
    from modelswap_engine.weights.pace import Pace

    return loading.build_model(str(directory), ranges(directory), pace=Pace())


def raw(tensor: Any) -> bytes:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def shared(state: dict[str, Any]) -> set[frozenset[str]]:
    """Return which names are one piece of memory."""
    places: dict[int, set[str]] = {}
    for name, tensor in state.items():
        places.setdefault(tensor.data_ptr(), set()).add(name)
    return {frozenset(names) for names in places.values()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every family in every dtype, written once."""
    from tests.support.models import FAMILIES

    assert tuple(FAMILIES) == _FAMILIES
    root = tmp_path_factory.mktemp("families")
    return {
        (family, dtype): FAMILIES[family](root / f"{number}-{dtype}", dtype=dtype)
        for number, family in enumerate(_FAMILIES)
        for dtype in _DTYPES
    }


def variant(base: Path, folder: Path, picks: Iterable[int], seed: int) -> Path:
    """Give some tensors of a checkpoint new values; which, is chosen by number."""
    from tests.support.models import tensor_names, write_variant

    names = tensor_names(base)
    return write_variant(base, folder, {names[pick % len(names)] for pick in picks}, seed=seed)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(family=st.sampled_from(_FAMILIES), dtype=st.sampled_from(_DTYPES), steps=_STEPS)
def test_any_diffs_of_any_model_end_as_a_fresh_load(
    made: dict[tuple[str, str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    dtype: str,
    steps: Sequence[tuple[str, set[int], int]],
) -> None:
    folder, numbers = tmp_path_factory.mktemp("diff"), itertools.count()
    live = Live(made[family, dtype])
    expected, previous = live.directory, None
    for end, picks, seed in steps:
        operation = f"op{next(numbers)}"
        if end == "back":
            if previous is None:
                continue
            live.updater.stage_retained(StageRetained(operation_id=operation, digest=digest_of(previous), directory=""))
            live.commit(operation)
            expected, previous = previous, expected
        else:
            new = variant(expected, folder / operation, picks, seed)
            live.stage(new, operation)
            if end != "dropped":
                live.commit(operation)
            if end == "undone":
                live.updater.rollback(operation)
            if end == "kept":
                expected, previous = new, expected
        live.updater.release(operation, previous=False)
        live.directory = expected
        live.assert_is(expected)


@pytest.mark.parametrize("family", _FAMILIES)
def test_every_tensor_of_every_family_can_be_changed_at_once(
    made: dict[tuple[str, str], Path], tmp_path: Path, family: str
) -> None:
    live = Live(made[family, "bfloat16"])
    new = variant(live.directory, tmp_path / "new", range(100), 5)
    live.stage(new, "all")
    live.commit("all")
    live.assert_is(new)


def test_a_checkpoint_that_is_only_sharded_otherwise_needs_nothing(
    made: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    from tests.support.models import reshard

    base = made["llama", "bfloat16"]
    again = reshard(base, tmp_path / "again", shard="60KB")
    assert len(list(again.glob("*.safetensors"))) > 2
    live = Live(base)
    groups = [group.sources for group in live.updater.groups]
    assert stage_order(base, again, operation_id="op", groups=groups).tensors == ()
    live.assert_is(again)


def test_tied_tensors_that_disagree_are_refused_by_name(made: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """The checkpoint has both names of the tied pair; a version in which they differ is another model."""
    from tests.support import models

    base = models.write_both_tied(made["qwen3", "float32"], tmp_path / "base")
    live = Live(base)
    (tied,) = [group for group in live.updater.groups if len(group.sources) == 2]
    assert set(tied.sources) == {"lm_head.weight", "model.embed_tokens.weight"}
    assert [group.tied for group in live.updater.groups if group.tied] == [tied.sources]
    torn = models.write_variant(base, tmp_path / "torn", ["lm_head.weight"], seed=1)
    with pytest.raises(IncompatibleModel, match="tied"):
        live.stage(torn, "torn")
    live.assert_is(base)
    both = models.write_both_tied(
        models.write_variant(made["qwen3", "float32"], tmp_path / "x", ["model.embed_tokens.weight"], seed=2),
        tmp_path / "both",
    )
    live.stage(both, "both")
    live.commit("both")
    live.assert_is(both)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_one_expert_takes_all_experts_of_its_layer_along(
    made: dict[tuple[str, str], Path], tmp_path: Path, family: str
) -> None:
    from tests.support.models import tensor_names, write_variant

    base = made[family, "float32"]
    name = next(name for name in tensor_names(base) if ".experts.1." in name)
    new = write_variant(base, tmp_path / "new", [name], seed=1)
    live = Live(base)
    order = stage_order(base, new, operation_id="op", groups=[group.sources for group in live.updater.groups])
    assert len(order.tensors) in {4, 8}
    with pytest.raises(ModelswapError, match="fused"):
        live.stage(new, "half", whole_groups=False)
    live.assert_is(base)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_weights_stored_in_eight_bits_are_widened_exactly_and_proven_in_eight_bits(tmp_path: Path, kind: str) -> None:
    """The one quantised form that is exact without a kernel of its own: every eight-bit float is a bfloat16."""
    from tests.support import models

    base = models.narrow(models.tiny_llama(tmp_path / "wide", dtype="bfloat16"), tmp_path / "base", kind=kind)
    names = [name for name in models.tensor_names(base) if "proj" in name]
    live = Live(base)
    assert not live.updater.unverifiable
    new = models.write_variant(base, tmp_path / "new", names[:3], seed=2)
    live.stage(new, "op")
    live.commit("op")
    live.assert_is(new)


def test_half_precision_that_overflows_while_it_is_stored_is_refused(tmp_path: Path) -> None:
    from modelswap_engine.protocol.errors import ChecksFailed
    from tests.support import models

    base = models.tiny_llama(tmp_path / "base", dtype="float16")
    live = Live(base)
    new = models.write_variant(base, tmp_path / "new", [], seed=0)
    models.edit_tensor(new, "model.norm.weight", lambda tensor: tensor * 1e6)
    with pytest.raises(ChecksFailed, match="norm"):
        live.stage(new, "op")
    live.assert_is(base)


def test_a_parameter_that_was_converted_with_a_loss_is_still_proven(made: dict[tuple[str, str], Path]) -> None:
    from modelswap_engine.protocol.errors import ManifestMismatch

    live = Live(made["llama, other norms", "bfloat16"])
    assert len(live.updater.unverifiable) == 5  # two norms in each of two layers, and the last one
    live.model.model.norm.weight.data[3] += 1
    (wrong,) = [i for i in live.updater.runtime(live.updater.snapshot(), live.updater.groups) if i.actual != i.expected]
    assert wrong.sources == ("model.norm.weight",)
    with pytest.raises(ManifestMismatch, match=r"model\.norm\.weight"):
        live.updater.verify(strict=True)
