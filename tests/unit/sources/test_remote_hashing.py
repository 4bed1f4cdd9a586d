"""Hashing a checkpoint elsewhere: each byte comes once, whatever breaks off, and nothing is kept."""

from pathlib import Path

import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.protocol.errors import ModelswapError, SourceUnreadable
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.remote import hashing
from modelswap_engine.sources.remote.contents import read_remote
from modelswap_engine.sources.remote.fetch import FetchSettings
from modelswap_engine.sources.remote.folders import Folders
from tests.support.checkpoints import TENSORS, write_checkpoint
from tests.support.memory_places import Fault, MemoryPlaces

URI = "mem://bucket/chat/1.0"
MANY = TENSORS | {f"layers.{number}": ("U8", (number,), bytes(range(number))) for number in (0, 1, 0, 90, 200, 7, 0)}


@pytest.fixture
def places(tmp_path: Path) -> MemoryPlaces:
    made = MemoryPlaces()
    made.upload(URI, write_checkpoint(tmp_path / "a", MANY, shards=2))
    return made


async def hashed(places: MemoryPlaces, *faults: Fault) -> tuple[Manifest, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []

    async def sleep(_: float) -> None: ...

    async with Folders(places, URI, credentials="", allowed=Allowed(["mem://bucket"])) as folders:
        contents = await read_remote(folders)
        places.forget()
        places.faults.extend(faults)
        found = await hashing.hash_remote(
            contents,
            folders,
            progress=lambda done, total: told.append((done, total)),
            settings=FetchSettings(parallel=2, attempts=3),
            sleep=sleep,
        )
    assert places.opened == 0
    return found, told


@pytest.mark.parametrize("run_bytes", [1, 100, 1 << 20])
async def test_every_byte_comes_once(
    places: MemoryPlaces, tmp_path: Path, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "RUN_BYTES", run_bytes)
    found, told = await hashed(places)
    assert found == build_manifest(tmp_path / "a")
    assert sum(places.given.values()) == found.total_bytes
    assert told[-1] == (found.total_bytes, found.total_bytes)


async def test_what_breaks_off_goes_on(places: MemoryPlaces, tmp_path: Path) -> None:
    broken: set[tuple[str, int]] = set()

    def once(file: str, start: int, _: int) -> ModelswapError | None:
        if start % 3 or (file, start) in broken:
            return None
        broken.add((file, start))
        return SourceUnreadable("it broke off")

    found, _ = await hashed(places, once)
    assert found == build_manifest(tmp_path / "a")
    assert sum(places.given.values()) == found.total_bytes
    assert len(broken) > 3


async def test_what_lasts_is_told(places: MemoryPlaces) -> None:
    with pytest.raises(SourceUnreadable, match=r"model-0000\d-of-00002\.safetensors is gone at \d+"):
        await hashed(places, lambda file, start, stop: SourceUnreadable(f"{file} is gone at {start} of {stop}"))
