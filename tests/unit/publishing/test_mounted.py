"""Publishing to a mounted folder: it appears with all that is in it, or not at all."""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.protocol.errors import (
    AlreadyPublished,
    BadRequest,
    ManifestMismatch,
    ModelswapError,
    PublishFailed,
    SourceChanged,
    SourceNotAllowed,
    SourceNotFound,
    UnsupportedFormat,
    UnsupportedScheme,
)
from modelswap_engine.publishing.anywhere import Anywhere
from modelswap_engine.publishing.folder import read_folder
from modelswap_engine.publishing.mounted import MountedPlace
from modelswap_engine.publishing.packing import PackOptions
from modelswap_engine.publishing.port import File
from modelswap_engine.publishing.publisher import Published, publish
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.remote.port import FileStat
from tests.support.checkpoints import TENSORS, write_checkpoint
from tests.support.whole_folders import order


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "a", shards=2)


def volume(tmp_path: Path) -> Path:
    return tmp_path / "volume" / "models"


async def to(uri: str, folder: Path, *, base: str = "") -> Published:
    return await Anywhere().publish(lambda _: read_folder(folder), uri, base=base)


async def test_a_folder_is_what_a_pod_reads(tmp_path: Path, folder: Path) -> None:
    target = volume(tmp_path) / "chat" / "1.0"
    done = await to(f"file://{target}", folder)
    resolved = await FileSource(roots=[volume(tmp_path)], cache=None).resolve(done.uri)
    assert resolved.manifest.digest == done.digest == build_manifest(folder).digest
    for file in folder.iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()
    assert [entry.name for entry in target.parent.iterdir()] == ["1.0"], "nothing is left beside it"
    assert target.stat().st_mode & 0o777 == 0o755
    assert (await to(f"file://{target}", folder)).already_there


async def test_what_is_there_stays(tmp_path: Path, folder: Path) -> None:
    target = volume(tmp_path) / "1.0"
    await to(f"file://{target}", folder)
    other = write_checkpoint(tmp_path / "b", TENSORS | {"new": ("U8", (1,), b"x")})
    with pytest.raises(AlreadyPublished):
        await to(f"file://{target}", other)
    (volume(tmp_path) / "2.0").mkdir()
    (volume(tmp_path) / "2.0" / "model.safetensors").write_bytes(b"somebody's")
    with pytest.raises(AlreadyPublished, match="without a manifest"):
        await to(f"file://{volume(tmp_path)}/2.0", other)
    (volume(tmp_path) / "3.0").mkdir()
    await to(f"file://{volume(tmp_path)}/3.0", other)
    assert {entry.name for entry in volume(tmp_path).iterdir()} == {"1.0", "2.0", "3.0"}


def changed(tmp_path: Path, number: int = 1) -> Path:
    """Write a checkpoint of which one tensor is another."""
    return write_checkpoint(tmp_path / f"changed-{number}", TENSORS | {"b.weight": ("F32", (2,), bytes([number] * 8))})


async def test_what_is_not_new_is_read_where_it_lies(tmp_path: Path, folder: Path) -> None:
    base = await to(f"file://{volume(tmp_path)}/1.0", folder)
    done = await to(f"file://{volume(tmp_path)}/1.1", changed(tmp_path), base=base.uri + "/")
    last = await to(f"file://{volume(tmp_path)}/1.2", changed(tmp_path, 2), base=done.uri)
    assert (done.changed_tensors, last.changed_tensors, done.pack) == (1, 1, None)
    target = volume(tmp_path) / "1.2"
    assert {file.name for file in target.iterdir()} == {
        "changed-00001-of-00001.safetensors",
        "config.json",
        MANIFEST_FILE,
    }
    source = FileSource(roots=[volume(tmp_path)], cache=None)
    resolved = await source.resolve(last.uri)
    assert resolved.manifest.digest == build_manifest(tmp_path / "changed-2").digest == last.digest
    for name, (_, _, data) in (TENSORS | {"b.weight": ("F32", (2,), bytes([2] * 8))}).items():
        at = resolved.range_of(name)
        with Path(at.path).open("rb") as file:
            file.seek(at.offset)
            assert file.read(at.nbytes) == data
            assert Path(at.path).parent.name == ("1.2" if name == "b.weight" else "1.0"), "never what only refers to it"
    await resolved.unchanged()
    made = await Materialiser(tmp_path / "engine").write(await order(target, tmp_path / "scratch"))
    assert build_manifest(made).digest == last.digest
    shard = next((volume(tmp_path) / "1.0").glob("model-*.safetensors"))
    shard.touch()
    with pytest.raises(SourceChanged, match=shard.name):
        await resolved.unchanged()


async def test_a_claim_can_be_named_as_the_pods_do(tmp_path: Path, folder: Path) -> None:
    base = await to(f"file://{volume(tmp_path)}/1.0", folder)
    done = await to(f"file://{volume(tmp_path)}/1.1", changed(tmp_path), base=base.uri)
    moved(volume(tmp_path) / "1.1", "pvc://models/1.0")
    source = FileSource(roots=[], claims={"models": volume(tmp_path)}, cache=None)
    assert (await source.resolve("pvc://models/1.1")).manifest.digest == done.digest
    with pytest.raises(SourceNotAllowed, match=r"'a.weight' lies in pvc://models/1.0: the claim 'models' is not"):
        await FileSource(roots=[volume(tmp_path)], cache=None).resolve(done.uri)


def moved(folder: Path, place: str) -> None:
    """Have a manifest say that what is elsewhere lies there."""
    shown = manifests.decode((folder / MANIFEST_FILE).read_bytes())
    tensors = {
        entry.name: msgspec.structs.replace(entry, place=place if entry.place else "") for entry in shown.tensors
    }
    sides = {side.name: side for side in shown.side_files}
    lie = manifests.make_manifest(tensors, sides, architecture=shown.architecture)
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(lie))


@pytest.mark.parametrize(
    ("place", "error", "cause"),
    [
        ("file://{0}/outside", SourceNotAllowed, "outside the allowed roots"),
        ("file://{0}/volume/models/../../outside", SourceNotAllowed, "outside the allowed roots"),
        ("file://{0}/volume/models/link", SourceNotAllowed, "outside the allowed roots"),
        ("file://{0}/volume/models/none", SourceNotFound, "nothing is there"),
        ("pvc://secret/1.0", SourceNotAllowed, "'secret' is not mounted"),
        ("s3://bucket/1.0", UnsupportedFormat, "mounted folders only"),
        ("../1.0", UnsupportedFormat, "mounted folders only"),
        ("file://{0}/volume/models/other", ManifestMismatch, "tensor 'a.weight'"),
    ],
)
async def test_a_place_that_may_not_be_read_is_refused_by_name(
    tmp_path: Path, folder: Path, place: str, error: type[ModelswapError], cause: str
) -> None:
    base = await to(f"file://{volume(tmp_path)}/1.0", folder)
    done = await to(f"file://{volume(tmp_path)}/1.1", changed(tmp_path), base=base.uri)
    write_checkpoint(tmp_path / "outside", shards=2)
    write_checkpoint(volume(tmp_path) / "other", {"x": ("U8", (1,), b"x")})
    (volume(tmp_path) / "link").symlink_to(tmp_path / "outside")
    moved(volume(tmp_path) / "1.1", named := place.format(tmp_path))
    with pytest.raises(error) as caught:
        await FileSource(roots=[volume(tmp_path)], cache=None).resolve(done.uri)
    assert cause in caught.value.message
    assert caught.value.details["tensor"] == "a.weight"
    assert error is ManifestMismatch or named in caught.value.message


async def test_a_base_that_is_gone_is_said(tmp_path: Path, folder: Path) -> None:
    base = await to(f"file://{volume(tmp_path)}/1.0", folder)
    done = await to(f"file://{volume(tmp_path)}/1.1", changed(tmp_path), base=base.uri)
    shutil.rmtree(volume(tmp_path) / "1.0")
    with pytest.raises(SourceNotFound, match=r"lies in file:///.*/1.0: .*nothing is there"):
        await FileSource(roots=[volume(tmp_path)], cache=None).resolve(done.uri)


class Full(MountedPlace):
    """A volume that is full after some files."""

    async def put(self, upload: File, data: AsyncIterator[bytes]) -> FileStat:
        with self._telling(upload.name):
            if upload.name.startswith("model-00002"):
                raise OSError(errno.ENOSPC, "No space left on device")
        return await super().put(upload, data)


async def test_a_full_volume_is_left_as_it_was(tmp_path: Path, folder: Path) -> None:
    place = Full(f"file://{volume(tmp_path)}/1.0")
    with pytest.raises(PublishFailed, match=r"model-00002.*No space left"):
        await publish(read_folder(folder), place)
    await place.close()
    assert list(volume(tmp_path).iterdir()) == []


async def test_of_two_at_once_one_is_refused(tmp_path: Path, folder: Path) -> None:
    other = write_checkpoint(tmp_path / "b", TENSORS | {"new": ("U8", (1,), b"x")})
    uri = f"file://{volume(tmp_path)}/1.0"
    done = await asyncio.gather(to(uri, folder), to(uri, other), return_exceptions=True)
    (won,) = (result for result in done if isinstance(result, Published))
    (lost,) = (result for result in done if not isinstance(result, Published))
    assert isinstance(lost, AlreadyPublished)
    assert build_manifest(volume(tmp_path) / "1.0").digest == won.digest
    assert MANIFEST_FILE in {entry.name for entry in (volume(tmp_path) / "1.0").iterdir()}
    assert len(list(volume(tmp_path).iterdir())) == 1


async def test_what_cannot_be_published_to(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadRequest, match="no pod reads both"):
        await to(f"file://{volume(tmp_path)}/1.1", folder, base="s3://bucket/1.0")
    with pytest.raises(BadRequest, match="no pod reads both"):
        await to("s3://bucket/1.1", folder, base=f"file://{volume(tmp_path)}/1.0")
    with pytest.raises(UnsupportedScheme, match="https:"):
        await to("https://host/1.1", folder)
    with pytest.raises(SourceNotAllowed):
        await to("file://host/1.1", folder)
    assert not volume(tmp_path).exists()
    uri = f"file://{volume(tmp_path)}/1.1"
    base = await to(f"file://{volume(tmp_path)}/1.0", folder)
    with pytest.raises(BadRequest, match="and no pack"):
        await Anywhere().publish(lambda _: read_folder(folder), uri, base=base.uri, pack=PackOptions(required=True))
