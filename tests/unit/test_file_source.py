"""``file:`` URIs through the public seam: containment, shipped and computed manifests, the cache, later changes."""

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.layout import MAX_SIGNATURE_BYTES, SIGNATURE_FILE, Evidence
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.protocol.errors import (
    InvalidCheckpoint,
    ManifestMismatch,
    SourceChanged,
    SourceNotAllowed,
    SourceNotFound,
    SourceUnreadable,
    UnsupportedFormat,
    UnsupportedScheme,
)
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.registry import Sources
from tests.support.checkpoints import CONFIG, SINGLE, TENSORS, safetensors, write_checkpoint

LATER_NS = 10_000_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def folder(root: Path) -> Path:
    return write_checkpoint(root / "m-1.0", side_files={"config.json": CONFIG, "merges.txt": b"a b"})


def later() -> int:
    """The wall clock ten seconds on: files written just now are old enough to be trusted by their stamps."""
    return time.time_ns() + LATER_NS


def ship(folder: Path) -> None:
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(build_manifest(folder)))


async def test_ranges_point_at_the_bytes(root: Path, folder: Path) -> None:
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    assert resolved.uri == folder.as_uri()
    for name, (dtype, shape, data) in TENSORS.items():
        found = resolved.range_of(name)
        with Path(found.path).open("rb") as stream:
            stream.seek(found.offset)
            assert stream.read(found.nbytes) == data
        assert (found.dtype, found.shape, found.sha256) == (dtype, shape, resolved.manifest.by_name[name].sha256)
    with pytest.raises(KeyError):
        resolved.range_of("nothing")


async def test_what_vouches_for_a_version_is_handed_on_as_it_is(root: Path, folder: Path) -> None:
    source = FileSource(roots=[root], cache=None)
    (folder / SIGNATURE_FILE).write_bytes(b"signature")
    assert (await source.resolve(folder.as_uri())).evidence is None, "without a manifest it is of nothing"
    ship(folder)
    resolved = await source.resolve(folder.as_uri())
    assert resolved.evidence == Evidence((folder / MANIFEST_FILE).read_bytes(), b"signature")
    (folder / SIGNATURE_FILE).write_bytes(b"another one")
    with pytest.raises(SourceChanged):
        await resolved.unchanged()
    (folder / SIGNATURE_FILE).write_bytes(bytes(MAX_SIGNATURE_BYTES + 1))
    with pytest.raises(InvalidCheckpoint, match=SIGNATURE_FILE):
        await source.resolve(folder.as_uri())


async def test_header_bytes_leave_tensors_out(root: Path, folder: Path) -> None:
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    every_byte = sum(file.stat().st_size for file in folder.iterdir())
    assert resolved.header_bytes == every_byte - resolved.manifest.total_bytes


@pytest.mark.parametrize(
    "form", ["file://{}", "file:{}", "file://localhost{}", "FILE://{}", "file://{}/", "file://{}/../m-1.0"]
)
async def test_forms_of_a_uri(form: str, root: Path, folder: Path) -> None:
    sources = Sources({"file": FileSource(roots=[root], cache=None)})
    assert (await sources.resolve(form.format(folder))).manifest.digest == build_manifest(folder).digest


async def test_escaped_characters_in_a_uri(root: Path) -> None:
    folder = write_checkpoint(root / "my model é")
    assert await FileSource(roots=[root], cache=None).resolve(folder.as_uri())


@pytest.mark.parametrize("uri", ["s3://bucket/m", "https://user:secret@host/m", "m", "", "../m", "f\nile:///m"])
async def test_unknown_schemes_name_the_known_ones_and_no_secret(uri: str, root: Path) -> None:
    with pytest.raises(UnsupportedScheme) as caught:
        await Sources({"file": FileSource(roots=[root], cache=None)}).resolve(uri)
    assert "file:" in caught.value.advice
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "file://otherhost/models/m",
        "file:relative",
        "file:///m?x=1",
        "file:///m#x",
        "file:///m%00",
        "file:///m%0a",
        "file:///%ff",
        "file://[/m",
        "file:///m\n",
        "file:///m\u202ed",
        "file:///m\ud800",
        "file:///../../etc",
        "file:///proc/self/root/etc",
        "file:///etc/passwd",
        "file:///does/not/exist",
    ],
)
async def test_malformed_or_outside_uris(uri: str, root: Path) -> None:
    with pytest.raises(SourceNotAllowed) as caught:
        await FileSource(roots=[root], cache=None).resolve(uri)
    assert caught.value.advice
    assert str(caught.value).isprintable()


async def test_a_sibling_whose_name_starts_like_the_root_is_outside(root: Path) -> None:
    other = write_checkpoint(root.parent / "models-private")
    with pytest.raises(SourceNotAllowed):
        await FileSource(roots=[root], cache=None).resolve(other.as_uri())


async def test_links_may_not_leave_the_roots_but_roots_may_be_links(root: Path, folder: Path) -> None:
    outside = write_checkpoint(root.parent / "outside")
    (root / "link").symlink_to(outside)
    with pytest.raises(SourceNotAllowed):
        await FileSource(roots=[root], cache=None).resolve((root / "link").as_uri())
    (root.parent / "alias").symlink_to(root)
    aliased = FileSource(roots=[root.parent / "alias"], cache=None)
    assert await aliased.resolve(folder.as_uri())
    assert await aliased.resolve((root.parent / "alias" / folder.name).as_uri())


async def test_a_tensor_file_that_links_out_of_the_roots(root: Path, folder: Path) -> None:
    (folder / SINGLE).rename(root.parent / "secret")
    (folder / SINGLE).symlink_to(root.parent / "secret")
    with pytest.raises(InvalidCheckpoint, match="link that leaves"):
        await FileSource(roots=[root], cache=None).resolve(folder.as_uri())


async def test_nothing_there(root: Path, folder: Path) -> None:
    source = FileSource(roots=[root], cache=None)
    with pytest.raises(SourceNotFound):
        await source.resolve((root / "nothing").as_uri())
    with pytest.raises(UnsupportedFormat):
        await source.resolve((folder / SINGLE).as_uri())
    with pytest.raises(SourceUnreadable):
        await source.resolve((root / ("x" * 300)).as_uri())
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises((SourceNotFound, SourceNotAllowed)):
        await source.resolve((root / "a").as_uri())


async def test_a_shipped_manifest_saves_the_hashing(root: Path, folder: Path) -> None:
    ship(folder)
    told: list[int] = []
    source = FileSource(roots=[root], cache=None, progress=lambda done, total: told.append(done))
    resolved = await source.resolve(folder.as_uri())
    assert resolved.manifest == build_manifest(folder)
    assert told == []


async def test_hashes_of_a_shipped_manifest_are_trusted_until_the_bytes_are_read(root: Path, folder: Path) -> None:
    ship(folder)
    data = bytearray((folder / SINGLE).read_bytes())
    data[-1] ^= 1
    (folder / SINGLE).write_bytes(data)
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    assert resolved.manifest != build_manifest(folder)  # the rank that reads the bytes refuses them


def reshape(folder: Path) -> None:
    (folder / SINGLE).write_bytes(safetensors(TENSORS | {"a.weight": ("BF16", (3, 2), bytes(12))}))


def retype(folder: Path) -> None:
    (folder / SINGLE).write_bytes(safetensors(TENSORS | {"a.weight": ("F16", (2, 3), bytes(12))}))


def remove(folder: Path) -> None:
    (folder / SINGLE).write_bytes(safetensors({name: TENSORS[name] for name in ("a.weight", "b.weight")}))


def add(folder: Path) -> None:
    (folder / SINGLE).write_bytes(safetensors(TENSORS | {"extra": ("U8", (1,), b"x")}))


def move(folder: Path) -> None:
    (folder / SINGLE).write_bytes(safetensors(TENSORS, metadata={"format": "pt"}))


def edit_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def drop_side_file(folder: Path) -> None:
    (folder / "merges.txt").unlink()


def add_side_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ evil }}")


@pytest.mark.parametrize("change", [reshape, retype, remove, add, move, edit_config, drop_side_file, add_side_file])
async def test_a_shipped_manifest_of_another_checkpoint(
    change: Callable[[Path], None], root: Path, folder: Path
) -> None:
    ship(folder)
    change(folder)
    with pytest.raises(ManifestMismatch, match=MANIFEST_FILE) as caught:
        await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    assert "manifest build" in caught.value.advice


async def test_a_shipped_manifest_that_lies_about_canonical_hashes(root: Path, folder: Path) -> None:
    honest = build_manifest(folder)
    lies = tuple(msgspec.structs.replace(side, canonical_sha256="0" * 64) for side in honest.side_files)
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(msgspec.structs.replace(honest, side_files=lies)))
    with pytest.raises(ManifestMismatch, match=r"config\.json"):
        await FileSource(roots=[root], cache=None).resolve(folder.as_uri())


async def test_a_shipped_manifest_that_lies_about_the_architecture(root: Path, folder: Path) -> None:
    lie = msgspec.structs.replace(build_manifest(folder), architecture="Other")
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(lie))
    with pytest.raises(ManifestMismatch, match="architecture"):
        await FileSource(roots=[root], cache=None).resolve(folder.as_uri())


class Counted:
    """Counts how often something was hashed."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, done: int, total: int) -> None:
        self.bytes = max(self.bytes, done)


async def test_an_unchanged_checkpoint_is_hashed_once(root: Path, folder: Path, tmp_path: Path) -> None:
    first, second = Counted(), Counted()
    one = await FileSource(roots=[root], cache=tmp_path / "c", progress=first, clock_ns=later).resolve(folder.as_uri())
    two = await FileSource(roots=[root], cache=tmp_path / "c", progress=second, clock_ns=later).resolve(folder.as_uri())
    assert one.manifest == two.manifest
    assert (first.bytes, second.bytes) == (one.manifest.total_bytes, 0)


async def test_a_file_that_is_too_young_for_its_stamp_is_not_kept(root: Path, folder: Path, tmp_path: Path) -> None:
    await FileSource(roots=[root], cache=tmp_path / "c").resolve(folder.as_uri())
    again = Counted()
    await FileSource(roots=[root], cache=tmp_path / "c", progress=again).resolve(folder.as_uri())
    assert again.bytes > 0


async def test_a_rewritten_file_is_hashed_again_whatever_its_size_and_mtime(
    root: Path, folder: Path, tmp_path: Path
) -> None:
    source = FileSource(roots=[root], cache=tmp_path / "c", clock_ns=later)
    before = await source.resolve(folder.as_uri())
    status = (folder / SINGLE).stat()
    data = bytearray((folder / SINGLE).read_bytes())
    data[-1] ^= 1
    (folder / SINGLE).write_bytes(data)
    os.utime(folder / SINGLE, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (await source.resolve(folder.as_uri())).manifest.digest != before.manifest.digest


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"stamps":{},"manifest":{}}', b"\xff\xff"])
async def test_a_damaged_cache_entry_is_no_entry(damage: bytes, root: Path, folder: Path, tmp_path: Path) -> None:
    source = FileSource(roots=[root], cache=tmp_path / "c", clock_ns=later)
    digest = (await source.resolve(folder.as_uri())).manifest.digest
    (entry,) = (tmp_path / "c").iterdir()
    entry.write_bytes(damage)
    assert (await source.resolve(folder.as_uri())).manifest.digest == digest


async def test_a_cache_entry_with_forged_hashes_or_places_is_no_entry(root: Path, folder: Path, tmp_path: Path) -> None:
    source = FileSource(roots=[root], cache=tmp_path / "c", clock_ns=later)
    honest = (await source.resolve(folder.as_uri())).manifest
    (file,) = (tmp_path / "c").iterdir()
    entry = msgspec.json.decode(file.read_bytes())
    for field, value in (("sha256", "0" * 64), ("offset", 8)):
        forged = msgspec.json.decode(msgspec.json.encode(entry))
        forged["manifest"]["tensors"][0][field] = value
        file.write_bytes(msgspec.json.encode(forged))
        assert (await source.resolve(folder.as_uri())).manifest == honest


async def test_a_cache_that_cannot_be_written_costs_nothing_but_time(root: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file where the folder should be")
    source = FileSource(roots=[root], cache=tmp_path / "c", clock_ns=later)
    assert (await source.resolve(folder.as_uri())).manifest.complete


def overwrite(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def replace(file: Path) -> None:
    copy = file.with_suffix(".new")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


@pytest.mark.parametrize("name", [SINGLE, "config.json", MANIFEST_FILE])
@pytest.mark.parametrize("change", [overwrite, replace, Path.unlink])
async def test_changes_after_resolving_are_seen(
    change: Callable[[Path], None], name: str, root: Path, folder: Path
) -> None:
    ship(folder)
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    await resolved.unchanged()
    change(folder / name)
    with pytest.raises(SourceChanged, match=name):
        await resolved.unchanged()


async def test_a_file_cut_short_while_it_is_hashed(root: Path) -> None:
    big = {f"t{number}": ("U8", (1 << 20,), bytes(1 << 20)) for number in range(12)}
    folder = write_checkpoint(root / "big", big)

    def cut(done: int, total: int) -> None:
        os.truncate(folder / SINGLE, 1000)

    with pytest.raises(SourceChanged, match=SINGLE):
        await FileSource(roots=[root], cache=None, progress=cut).resolve(folder.as_uri())


async def test_a_file_overwritten_while_it_is_hashed(root: Path, folder: Path) -> None:
    def touch(done: int, total: int) -> None:
        overwrite(folder / SINGLE)

    with pytest.raises(SourceChanged, match=SINGLE):
        await FileSource(roots=[root], cache=None, progress=touch).resolve(folder.as_uri())


async def test_cancelling_stops_the_hashing(root: Path) -> None:
    big = {f"t{number}": ("U8", (1 << 12,), bytes(1 << 12)) for number in range(64)}
    folder = write_checkpoint(root / "big", big)
    started, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def hold(done: int, total: int) -> None:
        seen.append(done)
        started.set()
        assert go_on.wait(30)

    task = asyncio.create_task(FileSource(roots=[root], cache=None, progress=hold).resolve(folder.as_uri()))
    await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await asyncio.to_thread(lambda: [t.join(30) for t in threading.enumerate() if t.name.startswith("hash")])
    assert len(seen) < len(big)


async def test_an_unreadable_file(root: Path, folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to("x" * 300)  # fails for root too, which permissions would not
    with pytest.raises(SourceUnreadable, match=SINGLE) as caught:
        await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    assert caught.value.retryable


async def test_copied_side_files_are_complete_read_only_and_verified(root: Path, folder: Path, tmp_path: Path) -> None:
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    target = tmp_path / "versions" / "abc"
    await resolved.copy_side_files(target)
    assert {entry.name for entry in target.iterdir()} == {"config.json", "merges.txt"}
    assert all(entry.read_bytes() == (folder / entry.name).read_bytes() for entry in target.iterdir())
    assert all(entry.stat().st_mode & 0o222 == 0 for entry in target.iterdir())
    assert [entry.name for entry in target.parent.iterdir()] == ["abc"]
    inode = target.stat().st_ino
    await resolved.copy_side_files(target)
    assert target.stat().st_ino == inode


async def test_a_copy_with_the_same_meaning_is_left_alone(root: Path, folder: Path, tmp_path: Path) -> None:
    # Two saves of one version have one digest, so one folder; an engine may be using it.
    other = write_checkpoint(root / "m-saved-again", side_files={"config.json": b"{}", "merges.txt": b"a b"})
    (other / "config.json").write_text(json.dumps(CONFIG | {"transformers_version": "9"}, indent=4))
    source = FileSource(roots=[root], cache=None)
    first, second = await source.resolve(folder.as_uri()), await source.resolve(other.as_uri())
    assert first.manifest.digest == second.manifest.digest
    await first.copy_side_files(tmp_path / "abc")
    inode = (tmp_path / "abc" / "config.json").stat().st_ino
    await second.copy_side_files(tmp_path / "abc")
    assert (tmp_path / "abc" / "config.json").stat().st_ino == inode


async def test_a_wrong_copy_is_replaced(root: Path, folder: Path, tmp_path: Path) -> None:
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    target = tmp_path / "abc"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "modeling.py").write_text("evil")
    await resolved.copy_side_files(target)
    assert {entry.name for entry in target.iterdir()} == {"config.json", "merges.txt"}


async def test_side_files_rewritten_after_resolving_are_copied_as_they_were(
    root: Path, folder: Path, tmp_path: Path
) -> None:
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    original = (folder / "config.json").read_bytes()
    (folder / "config.json").write_text('{"architectures": ["Evil"]}')
    await resolved.copy_side_files(tmp_path / "abc")
    assert (tmp_path / "abc" / "config.json").read_bytes() == original


async def test_a_place_that_cannot_be_written(root: Path, folder: Path, tmp_path: Path) -> None:
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    (tmp_path / "state").write_text("a file where a folder is needed")
    with pytest.raises(SourceUnreadable, match="side files"):
        await resolved.copy_side_files(tmp_path / "state" / "abc")


@pytest.mark.parametrize("shipped", [True, False])
async def test_another_content_under_the_name_is_seen(shipped: bool, root: Path, folder: Path) -> None:
    if shipped:
        ship(folder)
    resolved = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    assert (await resolved.moved()).found == ""
    for file in folder.iterdir():
        file.chmod(0o600)
    assert (await resolved.moved()).found == "", "other rights are no other content"
    overwrite(folder / SINGLE)
    os.utime(folder / SINGLE, ns=(0, later()))
    assert (await resolved.moved()).found == f"other files ({SINGLE})"
    if shipped:
        ship(folder)
        assert (await resolved.moved()).found == build_manifest(folder).digest
        overwrite(folder / SINGLE)
        ship(folder)
        assert (await resolved.moved()).found == "", "the old content is there again"


async def test_files_are_named_the_same_by_whoever_looks_at_them(root: Path, folder: Path) -> None:
    before = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    former = (await before.moved()).revision
    os.utime(folder / SINGLE, ns=(0, later()))
    since = await FileSource(roots=[root], cache=None).resolve(folder.as_uri())
    touched = (await since.moved()).revision
    assert await before.moved() == SourceLook(found=f"other files ({SINGLE})", revision=touched)
    assert "" != touched != former
    times = (folder / SINGLE).stat()
    replace(folder / SINGLE)
    os.utime(folder / SINGLE, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert await since.moved() == SourceLook(found=f"other files ({SINGLE})", revision=touched), (
        "inodes are a node's own"
    )


async def test_a_link_that_leads_elsewhere_by_now_is_followed(root: Path, folder: Path) -> None:
    link = root / "current"
    link.symlink_to(folder)
    resolved = await FileSource(roots=[root], cache=None).resolve(link.as_uri())
    assert (await resolved.moved()).found == ""
    other = write_checkpoint(root / "m-1.1", side_files={"config.json": CONFIG, "merges.txt": b"a b"})
    ship(other)
    link.unlink()
    link.symlink_to(other)
    assert (await resolved.moved()).found == "", "the same content at another place"
    overwrite(other / SINGLE)
    ship(other)
    assert (await resolved.moved()).found == build_manifest(other).digest
    shutil.rmtree(other)
    with pytest.raises(SourceNotFound):
        await resolved.moved()
