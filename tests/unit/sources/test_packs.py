"""Tensors made from packs of what differs: less travels, and nothing depends on a pack being good."""

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.delta.build import build_pack
from modelswap_engine.delta.layout import pack_name
from modelswap_engine.protocol.errors import ModelswapError, SourceUnreadable
from modelswap_engine.sources.file import REMEMBERED, FileSource
from tests.support.checkpoints import SINGLE, Tensor, write_checkpoint
from tests.support.deltas import folder_of
from tests.support.memory_places import MemoryPlaces
from tests.support.stores import on_the_way
from tests.unit.sources.test_remote_source import NEXT, URI, World, publish

NBYTES = 400_000
OLD: dict[str, Tensor] = {
    f"model.layers.{number}.weight": ("BF16", (NBYTES // 2,), random.Random(number).randbytes(NBYTES))
    for number in range(4)
}


def nudged(data: bytes, *, seed: int) -> bytes:
    """Change one element in a hundred."""
    changed, chance = bytearray(data), random.Random(seed)
    for at in chance.sample(range(0, len(data), 2), len(data) // 200):
        changed[at] ^= 1
    return bytes(changed)


NEW: dict[str, Tensor] = {
    name: (dtype, shape, nudged(data, seed=number)) for number, (name, (dtype, shape, data)) in enumerate(OLD.items())
}


class Versions:
    """Two versions that are published, and a pod that holds the old one."""

    def __init__(self, folder: Path) -> None:
        self.places = MemoryPlaces(piece=1 << 16)
        self.world = World(folder / "pod", self.places)
        self.old_folder = write_checkpoint(folder / "old", OLD)
        self.new_folder = write_checkpoint(folder / "new", NEW)
        self.pack = folder / "pack"
        build_pack(folder_of(self.old_folder), folder_of(self.new_folder), self.pack)
        self.old = publish(self.places, self.old_folder, URI)
        self.new = publish(self.places, self.new_folder, NEXT)

    def offer(self, data: bytes, *, base: Manifest | None = None) -> str:
        name = pack_name((base or self.old).digest)
        self.places.folders[NEXT][name] = data
        return name

    async def hold(self) -> None:
        await (await self.world.source.resolve(URI)).obtain(list(OLD))

    async def obtain(self) -> int:
        resolved = await self.world.source.resolve(NEXT)
        self.places.forget()
        return (await resolved.obtain(list(NEW))).source


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


async def test_a_pod_that_has_the_old_version_fetches_the_pack(versions: Versions) -> None:
    name = versions.offer(versions.pack.read_bytes())
    await versions.hold()
    count = await versions.obtain()
    assert versions.world.holds(versions.new)
    assert versions.places.given.keys() == {name}
    assert count == versions.places.given[name] <= versions.new.total_bytes / 30


async def test_a_pod_that_has_not_fetches_the_tensors(versions: Versions) -> None:
    versions.offer(versions.pack.read_bytes())
    assert await versions.obtain() == versions.new.total_bytes
    assert versions.world.holds(versions.new)


async def test_a_pack_for_another_version_is_not_looked_at(versions: Versions) -> None:
    name = versions.offer(versions.pack.read_bytes(), base=versions.new)
    await versions.hold()
    await versions.obtain()
    assert name not in versions.places.given
    assert versions.world.holds(versions.new)


@pytest.mark.parametrize("at", [3, 20, 200, -2000, -1])
async def test_a_damaged_pack_costs_bytes_and_nothing_else(versions: Versions, at: int) -> None:
    damaged = bytearray(versions.pack.read_bytes())
    damaged[at] ^= 1
    versions.offer(bytes(damaged))
    await versions.hold()
    await versions.obtain()
    assert versions.world.holds(versions.new)
    assert not on_the_way(versions.world.folder / "store")


@pytest.mark.parametrize("size", [0, 10, 60, 5000])
async def test_a_pack_that_is_cut_costs_bytes_and_nothing_else(versions: Versions, size: int) -> None:
    versions.offer(versions.pack.read_bytes()[:size])
    await versions.hold()
    await versions.obtain()
    assert versions.world.holds(versions.new)


async def test_a_pack_that_cannot_be_read_is_not_waited_for(versions: Versions) -> None:
    name = versions.offer(versions.pack.read_bytes())
    await versions.hold()

    def fault(file: str, at: int, stop: int) -> ModelswapError | None:
        return SourceUnreadable("503") if file == name and at > 5000 else None

    versions.places.faults.append(fault)
    await versions.obtain()
    assert versions.world.holds(versions.new)


async def test_a_damaged_base_is_found_out(versions: Versions) -> None:
    versions.offer(versions.pack.read_bytes())
    await versions.hold()
    path = versions.world.store.path(versions.old.by_name["model.layers.1.weight"].sha256)
    path.chmod(0o600)
    path.write_bytes(bytes(NBYTES))
    await versions.obtain()
    assert versions.world.holds(versions.new)


@pytest.fixture
async def mounted(versions: Versions) -> FileSource:
    """The old version as a folder that the pod mounts and never fetched."""
    files = FileSource(roots=[versions.old_folder], cache=None)
    await files.resolve(versions.old_folder.as_uri())
    versions.world.mounted = files.found
    versions.world.start()
    return files


async def test_a_pack_is_of_what_a_pod_mounts_too(versions: Versions, mounted: FileSource) -> None:
    name = versions.offer(versions.pack.read_bytes())
    assert await versions.obtain() == versions.places.given[name] <= versions.new.total_bytes / 30
    assert versions.places.given.keys() == {name}
    assert versions.world.holds(versions.new)


async def test_a_version_that_is_mounted_and_not_in_use_is_not_read(versions: Versions, mounted: FileSource) -> None:
    versions.offer(versions.pack.read_bytes())
    await mounted.retain(["sha256:another"])
    assert await versions.obtain() == versions.new.total_bytes


@pytest.mark.parametrize("wrong", [os.mkfifo, Path.touch, lambda path: path.symlink_to("/dev/zero"), None])
async def test_a_mounted_file_that_is_another_now_costs_bytes_only(
    versions: Versions, mounted: FileSource, wrong: Callable[[Path], object] | None
) -> None:
    versions.offer(versions.pack.read_bytes())
    file = versions.old_folder / SINGLE
    if wrong is not None:
        file.unlink()
        wrong(file)
    else:
        file.write_bytes(file.read_bytes()[:-10] + b"0123456789")
    await versions.obtain()
    assert versions.world.holds(versions.new)
    assert not on_the_way(versions.world.folder / "store")


async def test_a_base_on_a_mount_that_hangs_is_not_waited_for(
    versions: Versions, mounted: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelswap_engine.sources.remote.packs.BASE_SECONDS", 0.1)
    answers, stuck, opened = threading.Event(), list[threading.Thread](), os.open

    def hanging(path: str | Path, *arguments: int, **keywords: int) -> int:
        if Path(path).is_relative_to(versions.old_folder):
            stuck.append(threading.current_thread())
            answers.wait(30)
        return opened(path, *arguments, **keywords)

    name = versions.offer(versions.pack.read_bytes())
    monkeypatch.setattr(os, "open", hanging)
    try:
        async with asyncio.timeout(20):
            count = await versions.obtain()
        assert count == versions.new.total_bytes + versions.places.given[name]
        assert versions.world.holds(versions.new)
        assert all(thread.daemon for thread in stuck)
        assert 0 < len(stuck) <= len(OLD)
    finally:
        answers.set()


async def test_mounted_versions_are_remembered_while_they_are_used(tmp_path: Path) -> None:
    files = FileSource(roots=[tmp_path], cache=None)
    digests = []
    for number in range(REMEMBERED + 3):
        folder = write_checkpoint(tmp_path / str(number), {"w": ("U8", (1,), bytes([number]))})
        digests.append((await files.resolve(folder.as_uri())).manifest.digest)
        if number == 0:
            await files.retain(digests)
    assert [found.manifest.digest for found in files.found()] == [digests[0], *digests[-REMEMBERED:]]
