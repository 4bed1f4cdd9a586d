"""Adapters of an external engine: what it is told, in which order, and what happens when it forgets or refuses.

The engine here is in memory; what the real ones answer is in ``tests/engines``.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from modelswap_engine.backends.adapters import AdapterLayout, LoadAdapter
from modelswap_engine.backends.external.adapter_folders import AdapterFolders
from modelswap_engine.backends.external.adapters import ExternalAdapters, HeldAdapter
from modelswap_engine.backends.external.control import AdapterFacts
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.lora.config import parse_config
from modelswap_engine.lora.digest import adapter_digest
from modelswap_engine.lora.fit import fit
from modelswap_engine.protocol.adapters import adapter_id
from modelswap_engine.protocol.errors import (
    DigestMismatch,
    IncompatibleAdapter,
    InsufficientDisk,
    ManifestMismatch,
    NotReady,
    UnsupportedAdapter,
    WorkerLost,
)
from modelswap_engine.sources.file import FileSource
from tests.support.adapters import FIELDS, INPUTS, LAYOUT, MODULE, OUTPUTS, matrix, pair, write_adapter

FACTS = AdapterFacts(slots=1, held=2, max_rank=8, element_bytes=4)
OTHER = "model.layers.1.self_attn.q_proj"


class InMemory:
    """The routes of an engine.

    Attributes:
        names: adapters that it answers under, and their folders.
        files: what each folder held when it was loaded.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.files: dict[str, set[str]] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None

    async def adapters(self, *, seconds: float) -> Sequence[HeldAdapter]:
        return [
            HeldAdapter(name=name, directory=folder, everywhere=name not in self.forgotten)
            for name, folder in self.names.items()
        ]

    async def load_adapter(self, name: str, directory: str, *, seconds: float) -> None:
        self.calls.append(f"load {name}")
        self.names.pop(name, None)
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.files[name] = {entry.name for entry in Path(directory).iterdir()}
        self.names[name] = directory
        self.forgotten.discard(name)

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        self.calls.append(f"unload {name}")
        self.names.pop(name, None)


def base() -> list[TensorRange]:
    """A base with two modules that adapters can change, a head, and a norm."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{MODULE}.weight": (OUTPUTS, INPUTS), f"{OTHER}.weight": (OUTPUTS, INPUTS), "lm_head.weight": (9, INPUTS),
        "model.norm.weight": (INPUTS,),
    }  # fmt: skip
    return [
        TensorRange(name=name, dtype="F32", shape=shape, path="", offset=0, nbytes=0, sha256="")
        for name, shape in shapes.items()
    ]


async def order(folder: Path, name: str = "a", *, layout: AdapterLayout = LAYOUT) -> LoadAdapter:
    opened = await FileSource(roots=[folder.parent], cache=None).open_adapter(folder.as_uri())
    config, hashes = parse_config(opened.config), await opened.hash()
    digest = adapter_digest(config, opened.tensors, hashes)
    found = fit(name, config, opened.tensors, layout)
    modules = tuple(
        item.module(lambda entry: opened.range_of(entry, sha256=hashes[entry.name])) for item in found.pairs
    )
    return LoadAdapter(
        operation_id="op",
        adapter_id=adapter_id(name, digest),
        digest=digest,
        config=opened.config.decode(),
        modules=modules,
    )


@pytest.fixture
def engine() -> InMemory:
    return InMemory()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def place(shared: Path) -> AdapterFolders:
    return AdapterFolders(shared)


@pytest.fixture
async def host(engine: InMemory, place: AdapterFolders) -> ExternalAdapters:
    made = ExternalAdapters(engine, place)
    await made.begin(FACTS, {MODULE, OTHER}, base())
    return made


def folders(shared: Path) -> list[str]:
    return sorted(entry.name for entry in (shared / "adapters").iterdir())


async def test_what_can_be_is_what_the_engine_says_of_this_base(host: ExternalAdapters) -> None:
    layout = host.adapters()
    assert (layout.slots, layout.held, layout.max_rank) == (1, 2, 8)
    assert {(target.name, target.inputs, target.outputs) for target in layout.targets} == {
        (MODULE, INPUTS, OUTPUTS), (OTHER, INPUTS, OUTPUTS),
    }  # fmt: skip
    assert set(layout.refused) == {"lm_head"}
    host.lost()
    with pytest.raises(NotReady):
        host.adapters()


async def test_an_engine_that_names_no_modules_serves_no_adapters(engine: InMemory, shared: Path) -> None:
    host = ExternalAdapters(engine, AdapterFolders(shared))
    await host.begin(FACTS, (), base())
    assert host.adapters().slots == 0
    assert "which modules" in host.adapters().reason


async def test_an_adapter_is_a_folder_of_its_digest_that_says_what_was_understood_of_it(
    host: ExternalAdapters, engine: InMemory, tmp_path: Path, shared: Path
) -> None:
    tensors = {**pair(rank=2), **pair(OTHER, rank=4)}
    fields = FIELDS | {"rank_pattern": {"layers.1.self_attn.q_proj": 4}, "peft_version": "x", "eva_config": {"a": 1}}
    folder = write_adapter(tmp_path / "mine", fields=fields, tensors=tensors)
    wanted = await order(folder)
    await host.load_adapter(wanted)

    assert folders(shared) == [wanted.digest.removeprefix("sha256:")]
    assert engine.names == {wanted.adapter_id: str(shared / "adapters" / folders(shared)[0])}
    laid = Path(engine.names[wanted.adapter_id])
    assert engine.files[wanted.adapter_id] == {"adapter_config.json", "adapter_model.safetensors"}
    assert {entry.stat().st_mode & 0o222 for entry in laid.iterdir()} == {0}
    config = json.loads((laid / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) in [
        (2, 4, {OTHER: 4}), (4, 4, {MODULE: 2}),
    ]  # fmt: skip
    assert "eva_config" not in config
    assert parse_config((laid / "adapter_config.json").read_bytes()).scaling_of(OTHER) == 1.0
    mine = load_file(folder / "adapter_model.safetensors")
    theirs = load_file(laid / "adapter_model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in theirs.items()} == {
        name: tensor.tobytes() for name, tensor in mine.items()
    }


async def test_a_source_that_changed_meanwhile_never_reaches_the_engine(
    host: ExternalAdapters, engine: InMemory, tmp_path: Path, shared: Path
) -> None:
    wanted = await order(write_adapter(tmp_path / "mine"))
    other = {name: matrix(shape[0], shape[1], fill=7) for name, (_, shape, _) in pair().items()}
    write_adapter(tmp_path / "mine", tensors=other)
    with pytest.raises((ManifestMismatch, DigestMismatch)):
        await host.load_adapter(wanted)
    assert (engine.calls, folders(shared)) == ([], [])


async def test_a_folder_stays_while_any_name_leads_to_it_and_goes_after_the_last(
    host: ExternalAdapters, engine: InMemory, place: AdapterFolders, tmp_path: Path, shared: Path
) -> None:
    one, two = [await order(write_adapter(tmp_path / "mine"), name) for name in ("a", "b")]
    await host.load_adapter(one)
    await host.load_adapter(two)
    assert len(folders(shared)) == 1
    await host.drop_adapter(one.adapter_id)
    await place.collect()
    assert (list(engine.names), len(folders(shared))) == ([two.adapter_id], 1)
    await host.drop_adapter(two.adapter_id)
    await place.collect()
    assert (engine.names, folders(shared)) == ({}, [])


async def test_a_refused_adapter_leaves_nothing_behind(
    host: ExternalAdapters, engine: InMemory, place: AdapterFolders, tmp_path: Path, shared: Path
) -> None:
    engine.error = IncompatibleAdapter("no")
    with pytest.raises(IncompatibleAdapter):
        await host.load_adapter(await order(write_adapter(tmp_path / "mine")))
    await place.collect()
    assert (engine.names, folders(shared)) == ({}, [])


async def test_an_answer_that_never_came_costs_the_engine_its_trust(
    host: ExternalAdapters, engine: InMemory, tmp_path: Path
) -> None:
    told: list[str] = []

    def distrust(why: str) -> WorkerLost:
        told.append(why)
        return WorkerLost(why)

    host.attach(distrust)
    engine.error = WorkerLost("no answer")
    with pytest.raises(WorkerLost):
        await host.load_adapter(await order(write_adapter(tmp_path / "mine")))
    assert told == ["adapters: no answer"]


async def test_what_the_engine_forgot_is_loaded_again_when_it_is_looked_at(
    host: ExternalAdapters, engine: InMemory, tmp_path: Path
) -> None:
    wanted = [await order(write_adapter(tmp_path / "mine"), name) for name in ("gone", "pushed", "kept")]
    for item in wanted:
        await host.load_adapter(item)
    engine.names.pop(wanted[0].adapter_id)
    engine.forgotten.add(wanted[1].adapter_id)
    engine.calls.clear()
    await host.verify()
    assert set(engine.calls) == {f"load {item.adapter_id}" for item in wanted[:2]}
    engine.calls.clear()
    await host.verify()
    assert engine.calls == []


async def test_a_base_begins_without_the_adapters_of_before_and_leaves_those_of_others(
    host: ExternalAdapters, engine: InMemory, tmp_path: Path, shared: Path
) -> None:
    await host.load_adapter(await order(write_adapter(tmp_path / "mine")))
    engine.names["stranger"] = "/elsewhere/x"
    again = ExternalAdapters(engine, AdapterFolders(shared))
    await again.begin(FACTS, {MODULE}, base())
    assert engine.names == {"stranger": "/elsewhere/x"}
    assert folders(shared) == []


async def test_an_engine_with_one_rank_for_all_modules_gets_no_other_adapter(
    engine: InMemory, tmp_path: Path, shared: Path
) -> None:
    host = ExternalAdapters(engine, AdapterFolders(shared))
    facts = AdapterFacts(slots=1, held=2, max_rank=8, modules=frozenset({"q_proj"}), uniform=True)
    await host.begin(facts, (), base())
    tensors = {**pair(rank=2), **pair(OTHER, rank=4)}
    fields = FIELDS | {"rank_pattern": {"layers.1.self_attn.q_proj": 4}}
    with pytest.raises(UnsupportedAdapter, match="one rank"):
        await host.load_adapter(await order(write_adapter(tmp_path / "mine", fields=fields, tensors=tensors)))
    assert engine.calls == []


async def test_an_adapter_that_would_overfill_the_volume_is_refused_with_both_figures(
    engine: InMemory, tmp_path: Path, shared: Path
) -> None:
    shared.mkdir()
    (shared / "checkpoint").write_bytes(bytes(3 << 20))
    wanted = await order(write_adapter(tmp_path / "mine"))
    for limit, fits in ((4 << 20, False), (5 << 20, True)):
        host = ExternalAdapters(engine, AdapterFolders(shared, limit_bytes=limit))
        await host.begin(FACTS, {MODULE}, base())
        if fits:
            await host.load_adapter(wanted)
        else:
            with pytest.raises(InsufficientDisk, match=r"needs 1\.0 MiB, (0|1)\.\d MiB may"):
                await host.load_adapter(wanted)
    assert engine.calls == [f"load {wanted.adapter_id}"]
