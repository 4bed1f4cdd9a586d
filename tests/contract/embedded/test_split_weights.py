"""The weights of one rank of a split model, cut by transformers' own rules: staged, swapped and hashed in slices.

One process plays each rank in turn, over process groups that move nothing: what a rank holds is decided without
talking. What the ranks compute together is shown by real ones in ``test_ranks``.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
from msgspec.structs import replace
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from modelswap_engine.backends.embedded.loading import TransformersLoader, build_part
from modelswap_engine.backends.embedded.team import Team
from modelswap_engine.backends.port import Stage
from modelswap_engine.protocol.errors import IncompatibleModel, ManifestMismatch
from modelswap_engine.weights.export.view import Extract
from modelswap_engine.weights.live import LiveTable
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.updater import WeightUpdater
from tests.support import models
from tests.support.orders import digest_of, hashes_of, load_order, ranges, stage_order

pytestmark = pytest.mark.model

LONG = ("qwen3", "gemma3", "qwen3-moe")
FAMILIES = [
    pytest.param(name, marks=pytest.mark.full) if name in LONG else name
    for name in models.FAMILIES
    if name not in ("gpt2", "llama, sharded")
]


@contextlib.contextmanager
def team_of(rank: int, size: int) -> Iterator[Team]:
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Team(torch.device("cpu"), seconds=10, load_seconds=10)
    finally:
        distributed.destroy_process_group()


def updater_of(directory: Path, team: Team) -> tuple[WeightUpdater, LiveTable]:
    order = load_order(directory)
    model, slices = build_part(order.directory, order.tensors, team, pace=Pace())
    rules = TransformersLoader(model)
    updater = WeightUpdater(model, rules, digest=order.digest, checkpoint=order.tensors, slices=slices)
    updater.prove()
    return updater, LiveTable(model)


def held(table: LiveTable) -> dict[str, torch.Tensor]:
    return {name: slot.tensor.clone() for name, slot in table.slots.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def answers(updater: WeightUpdater) -> dict[str, str]:
    return updater.answers(updater.hash(updater.snapshot(), updater.groups)[0])


def proves(updater: WeightUpdater, directory: Path) -> bool:
    """Say whether the hashes are a checkpoint's, but for what was converted with a loss, which has its own."""
    found, blind = answers(updater), updater.unverifiable
    runtime = updater.runtime(updater.snapshot(), updater.groups)
    return all(item.actual == item.expected for item in runtime) and all(
        found[name] == value for name, value in hashes_of(directory).items() if name not in blind
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_swap_leaves_each_rank_with_the_bytes_of_a_fresh_load(family: str, tmp_path: Path) -> None:
    old = models.FAMILIES[family](tmp_path / "old")
    new = models.write_variant(old, tmp_path / "new", models.tensor_names(old)[::2], seed=3)
    whole = sum(tensor.nbytes for tensor in load_order(old).tensors)
    parts, extracts = [], list[dict[str, Extract]]()
    for rank in range(2):
        with team_of(rank, 2) as team:
            fresh = held(updater_of(new, team)[1])
            updater, table = updater_of(old, team)
            before = held(table)
            order = stage_order(old, new, operation_id="op", groups=[group.sources for group in updater.groups])
            staged = updater.stage(order, lambda work: work(Pace()))
            assert sum(tensor.untyped_storage().nbytes() for tensor in staged.version.tensors.values()) == sum(
                before[name].nbytes for name in staged.version.tensors
            ), "a staged slice holds the tensor that it was cut from"
            updater.prepare("op")
            updater.commit("op")
            assert updater.verify(strict=True) == digest_of(new)
            assert same(held(table), fresh)
            assert not same(fresh, before)
            assert proves(updater, new)
            extracts.append(extracted(updater))
            updater.rollback("op")
            assert updater.verify(strict=True) == digest_of(old)
            assert same(held(table), before)
            assert proves(updater, old)
            parts.append(sum(tensor.nbytes for tensor in before.values()))
    assert max(parts) < 0.6 * whole, "each rank holds about half of the model"
    # Each knows where its part belongs: together they are the file, byte for byte.
    truth = {name: tensor for file in new.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert extracts[0].keys() == extracts[1].keys()
    for name, first in extracts[0].items():
        assert torch.equal(together([first, extracts[1][name]], truth[name]), truth[name]), name


def extracted(updater: WeightUpdater) -> dict[str, Extract]:
    """Return a copy of what a rank gives of every tensor that can be had back."""
    names = {name for group in updater.groups for name in group.sources} - updater.unverifiable
    view = updater.view()
    found = {name: view.extract(name) for name in sorted(names)}
    return {name: Extract(item.tensor.clone(), item.dim, item.positions) for name, item in found.items()}


def together(parts: list[Extract], like: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(like)
    for part in parts:
        if part.dim is None:
            return part.tensor
        whole.index_copy_(part.dim, part.positions, part.tensor)
    return whole


def test_the_rest_of_a_fused_parameter_comes_from_the_slices_in_memory(tmp_path: Path) -> None:
    """One expert after the other is sent; what the others are lies in no file, and each rank has only a part of it."""
    old = models.tiny_mixtral(tmp_path / "old", layers=1, experts=2)
    sent = models.expert_gates(old)
    first = models.write_variant(old, tmp_path / "first", sent[:1], seed=5)
    second = models.write_variant(first, tmp_path / "second", sent[1:], seed=6)
    for rank in range(2):
        with team_of(rank, 2) as team:
            fresh = held(updater_of(second, team)[1])
            updater, table = updater_of(old, team)
            for step, (directory, name) in enumerate(zip((first, second), sent, strict=True)):
                operation, item = f"step {step}", {item.name: item for item in ranges(directory)}[name]
                updater.inbox.open(operation).put(name, load_file(item.path)[name], item.sha256)
                group = next(group for group in updater.groups if name in group.sources)
                assert len(group.sources) > 1
                tensors = tuple(replace(i, path="") for i in ranges(directory) if i.name in group.sources)
                order = Stage(
                    operation_id=operation, digest=digest_of(directory), directory=str(directory), tensors=tensors
                )
                updater.stage(order, lambda work: work(Pace()))
                updater.prepare(operation)
                updater.commit(operation)
                assert updater.verify(strict=True) == digest_of(directory)
                assert proves(updater, directory)
            assert same(held(table), fresh)
            # A slice that has changed in memory is not taken for the other part of anything.
            table.slot_of(group.slots[0]).tensor.view(-1).view(torch.uint8)[5] ^= 1
            with pytest.raises(ManifestMismatch):
                updater.stage(replace(order, operation_id="again"), lambda work: work(Pace()))


def test_a_byte_that_changes_in_one_slice_is_found_there_and_only_there(tmp_path: Path) -> None:
    directory = models.tiny_llama(tmp_path / "model")
    name = "model.layers.1.mlp.down_proj.weight"  # cut along its columns: no slice is a piece of the file
    with team_of(1, 2) as team:
        updater, table = updater_of(directory, team)
        table.slot_of(name).tensor.view(torch.uint8)[3, 5] ^= 1
        found = answers(updater)
        assert {key for key, value in hashes_of(directory).items() if found[key] != value} == {name}
        with pytest.raises(ManifestMismatch, match="down_proj"):
            updater.verify(strict=True)


def test_slices_that_transformers_cut_otherwise_are_noticed_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = models.tiny_llama(tmp_path / "model")
    right = TransformersLoader.slice

    def wrong(self: TransformersLoader, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = right(self, name, tensor)
        return held.flip(0) if "o_proj" in name else held

    monkeypatch.setattr(TransformersLoader, "slice", wrong)
    with team_of(0, 2) as team, pytest.raises(ManifestMismatch, match="o_proj"):
        updater_of(directory, team)


def test_a_model_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    order = load_order(models.tiny_gpt2(tmp_path / "model"))
    with team_of(0, 2) as team, pytest.raises(IncompatibleModel, match="cannot be split over 2 ranks"):
        build_part(order.directory, order.tensors, team, pace=Pace())
