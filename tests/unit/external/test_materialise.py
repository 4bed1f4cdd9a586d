"""The whole checkpoint at a stable path: written, proved, switched to, collected; sources that change; full disks."""

import os
from pathlib import Path

import msgspec
import pytest

from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.port import Load
from modelswap_engine.checkpoint.index import INDEX_FILE
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.checkpoint.manifest import decode as decode_manifest
from modelswap_engine.checkpoint.rules import DTYPE_BITS
from modelswap_engine.protocol.errors import (
    DigestMismatch,
    InsufficientDisk,
    ManifestMismatch,
    ModelswapError,
    NotFound,
    SourceChanged,
    SourceUnreadable,
    UnsupportedChange,
)
from tests.support.checkpoints import write_checkpoint
from tests.support.whole_folders import SIDE, digest_in, folders, leftovers, order, publish

PLENTY = 1 << 40


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "engine"


async def test_folder_holds_exactly_the_version(models: Path, root: Path, tmp_path: Path) -> None:
    source = publish(models, 1, shards=2)
    (source / "README.md").write_text("not of the version")
    wanted = await order(source, tmp_path)
    folder = await Materialiser(root).write(wanted)
    assert {entry.name for entry in folder.iterdir()} == {
        "model.safetensors", MANIFEST_FILE, "config.json", "merges.txt",
    }  # fmt: skip
    assert digest_in(folder) == wanted.digest
    assert decode_manifest((folder / MANIFEST_FILE).read_bytes()).digest == wanted.digest
    assert leftovers(root) == []


async def test_large_checkpoints_are_spread_over_files_with_an_index(models: Path, root: Path, tmp_path: Path) -> None:
    wanted = await order(publish(models, 1), tmp_path)
    folder = await Materialiser(root, shard_bytes=12).write(wanted)
    assert (folder / INDEX_FILE).is_file()
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert digest_in(folder) == wanted.digest


async def test_every_tensor_begins_where_readers_expect_it(root: Path, tmp_path: Path) -> None:
    tensors = {"a": ("U8", (3,), b"abc"), "b": ("BF16", (1,), b"bb"), "c": ("F64", (1,), b"c" * 8)}
    wanted = await order(write_checkpoint(tmp_path / "m" / "odd", {**tensors}, side_files=SIDE), tmp_path)
    folder = await Materialiser(root).write(wanted)
    written = decode_manifest((folder / MANIFEST_FILE).read_bytes())
    assert {name: entry.offset % max(1, DTYPE_BITS[entry.dtype] // 8) for name, entry in written.by_name.items()} == {
        "a": 0, "b": 0, "c": 0,
    }  # fmt: skip


async def test_progress_counts_every_byte(models: Path, root: Path, tmp_path: Path) -> None:
    wanted = await order(publish(models, 1), tmp_path)
    seen: list[tuple[int, int]] = []
    await Materialiser(root).write(wanted, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in wanted.tensors)
    assert seen[-1] == (total, total)


async def test_files_of_the_source_are_never_shared(models: Path, root: Path, tmp_path: Path) -> None:
    source = publish(models, 1)
    wanted = await order(source, tmp_path)
    folder = await Materialiser(root).write(wanted)
    with (source / "model.safetensors").open("r+b") as file:  # in place: what links lead to would change with it
        file.seek(-8, os.SEEK_END)
        file.write(b"XXXXXXXX")
    assert digest_in(folder) == wanted.digest


async def test_current_is_one_stable_path(models: Path, root: Path, tmp_path: Path) -> None:
    first, second = [await order(publish(models, number), tmp_path) for number in (1, 2)]
    place = Materialiser(root)
    assert await place.current() == ""
    await place.write(first)
    await place.switch(first.digest)
    path = place.path
    assert digest_in(path.resolve()) == first.digest
    await place.write(second)
    assert await place.current() == first.digest  # writing alone changes nothing
    await place.switch(second.digest)
    assert place.path == path
    assert digest_in(path.resolve()) == second.digest == await place.current()
    assert await place.previous() == first.digest


async def test_links_lead_to_the_same_places_wherever_the_volume_is_mounted(
    models: Path, root: Path, tmp_path: Path
) -> None:
    wanted = await order(publish(models, 1), tmp_path)
    place = Materialiser(root)
    await place.write(wanted)
    await place.switch(wanted.digest)
    moved = root.rename(tmp_path / "as-the-engine-sees-it")
    assert digest_in((moved / "current").resolve()) == wanted.digest


async def test_switching_back_and_to_what_is_current(models: Path, root: Path, tmp_path: Path) -> None:
    first, second = [await order(publish(models, number), tmp_path) for number in (1, 2)]
    place = Materialiser(root)
    for wanted in (first, second):
        await place.write(wanted)
        await place.switch(wanted.digest)
    await place.switch(second.digest)
    assert await place.previous() == first.digest
    await place.switch(first.digest)
    assert (await place.current(), await place.previous()) == (first.digest, second.digest)


async def test_what_was_not_written_cannot_be_current(root: Path) -> None:
    with pytest.raises(NotFound, match="not written"):
        await Materialiser(root).switch("sha256:" + "0" * 64)


async def test_collecting_keeps_current_previous_and_what_is_asked_for(
    models: Path, root: Path, tmp_path: Path
) -> None:
    orders = [await order(publish(models, number), tmp_path) for number in range(4)]
    place = Materialiser(root)
    for wanted in orders:
        await place.write(wanted)
    for wanted in orders[:2]:
        await place.switch(wanted.digest)
    await place.collect(keep=[orders[2].digest])
    assert folders(root) == {wanted.digest for wanted in orders[:3]}
    await place.collect()
    assert folders(root) == {wanted.digest for wanted in orders[:2]}
    await place.collect(previous=False)
    assert folders(root) == {orders[1].digest}
    assert (await place.current(), await place.previous()) == (orders[1].digest, "")
    assert leftovers(root) == []


async def test_what_is_there_is_not_written_again(models: Path, root: Path, tmp_path: Path) -> None:
    source = publish(models, 1)
    wanted = await order(source, tmp_path)
    folder = await Materialiser(root).write(wanted)
    (source / "model.safetensors").unlink()
    for place in (Materialiser(root), Materialiser(root)):
        assert await place.write(wanted) == folder


async def test_a_damaged_folder_of_an_earlier_process_is_written_again(
    models: Path, root: Path, tmp_path: Path
) -> None:
    wanted = await order(publish(models, 1), tmp_path)
    place = Materialiser(root)
    folder = await place.write(wanted)
    await place.switch(wanted.digest)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    again = Materialiser(root)
    assert digest_in(await again.write(wanted)) == wanted.digest == await again.current()
    assert leftovers(root) == []


# Sources that change under us


def overwrite(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(b"\xff\xff\xff\xff")


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 3)


def make_link(file: Path) -> None:
    elsewhere = file.with_name("elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (overwrite, ManifestMismatch, "hash to"),
        (truncate, SourceChanged, "ended at byte"),
        (Path.unlink, SourceUnreadable, "No such file"),
        (make_link, SourceUnreadable, "symbolic links"),
        (make_pipe, SourceUnreadable, "not a regular file"),
    ],
)
async def test_a_source_that_changed_is_caught(
    models: Path, root: Path, tmp_path: Path, change: object, error: type[ModelswapError], word: str
) -> None:
    source = publish(models, 1)
    wanted = await order(source, tmp_path)
    assert callable(change)
    change(source / "model.safetensors")
    with pytest.raises(error, match=word) as caught:
        await Materialiser(root).write(wanted)
    assert caught.value.advice
    assert (folders(root), leftovers(root)) == (set(), [])


async def test_side_files_of_another_version_are_caught(models: Path, root: Path, tmp_path: Path) -> None:
    wanted = await order(publish(models, 1), tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(DigestMismatch):
        await Materialiser(root).write(msgspec.structs.replace(wanted, directory=str(tmp_path / "other")))
    with pytest.raises(SourceUnreadable, match="side files"):
        await Materialiser(root).write(msgspec.structs.replace(wanted, directory=str(tmp_path / "none")))


async def test_a_tensor_that_lies_in_no_file_is_refused(models: Path, root: Path, tmp_path: Path) -> None:
    wanted = await order(publish(models, 1), tmp_path)
    sent = msgspec.structs.replace(wanted.tensors[0], path="")
    with pytest.raises(UnsupportedChange, match=wanted.tensors[0].name):
        await Materialiser(root).write(msgspec.structs.replace(wanted, tensors=(sent, *wanted.tensors[1:])))


# Room


async def test_a_full_disk_is_refused_with_figures_before_anything_is_written(
    models: Path, root: Path, tmp_path: Path
) -> None:
    wanted = await order(publish(models, 1), tmp_path)
    with pytest.raises(InsufficientDisk, match=r"needs 1\.0 MiB, 0\.5 MiB may be used") as caught:
        await Materialiser(root, free=lambda _: 1 << 19).write(wanted)
    assert caught.value.details == {"neededMiB": "1.0", "availableMiB": "0.5"}
    assert (folders(root), leftovers(root)) == (set(), [])


async def test_what_nobody_needs_makes_room(models: Path, root: Path, tmp_path: Path) -> None:
    orders = [await order(publish(models, number), tmp_path) for number in range(4)]
    place = Materialiser(root, free=lambda _: PLENTY if len(folders(root)) < 2 else 0)
    for wanted in orders[:2]:
        await place.write(wanted)
    await place.switch(orders[0].digest)
    await place.write(orders[2])  # does not fit beside the unused one, which goes
    assert folders(root) == {orders[0].digest, orders[2].digest}
    await place.switch(orders[2].digest)
    with pytest.raises(InsufficientDisk, match="beside the current and the previous"):
        await place.write(orders[3])
    assert folders(root) == {orders[0].digest, orders[2].digest}


async def test_a_limit_counts_what_is_there(models: Path, root: Path, tmp_path: Path) -> None:
    first, second = [await order(publish(models, number), tmp_path) for number in (1, 2)]
    place = Materialiser(root, free=lambda _: PLENTY, limit_bytes=3 << 20)
    await place.write(first)
    (root / "ballast").write_bytes(bytes(2 << 20))
    with pytest.raises(InsufficientDisk):
        await place.write(second)
    (root / "ballast").unlink()
    await place.write(second)


async def test_a_root_that_cannot_be_written_is_no_refusal_of_the_version(models: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    wanted: Load = await order(publish(models, 1), tmp_path)
    with pytest.raises(ModelswapError, match="Not a directory") as caught:
        await Materialiser(tmp_path / "file" / "engine").write(wanted)
    assert caught.value.retryable
