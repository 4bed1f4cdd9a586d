"""Publishing to a mounted folder: it appears with all that is in it, or not at all."""

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.protocol.errors import (
    AlreadyPublished,
    BadRequest,
    PublishFailed,
    SourceNotAllowed,
    UnsupportedScheme,
)
from modelswap_engine.publishing.anywhere import Anywhere
from modelswap_engine.publishing.folder import read_folder
from modelswap_engine.publishing.mounted import MountedPlace
from modelswap_engine.publishing.port import File
from modelswap_engine.publishing.publisher import Published, publish
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.remote.port import FileStat
from tests.support.checkpoints import TENSORS, write_checkpoint


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
    with pytest.raises(BadRequest, match="must hold all of it"):
        await to(f"file://{volume(tmp_path)}/1.1", folder, base="s3://bucket/1.0")
    with pytest.raises(BadRequest, match="must hold all of it"):
        await to("s3://bucket/1.1", folder, base=f"file://{volume(tmp_path)}/1.0")
    with pytest.raises(UnsupportedScheme, match="https:"):
        await to("https://host/1.1", folder)
    with pytest.raises(SourceNotAllowed):
        await to("file://host/1.1", folder)
    assert not volume(tmp_path).exists()
