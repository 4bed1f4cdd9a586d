"""What every place to publish to refuses: a file of which another number of bytes comes than it has."""

from collections.abc import AsyncIterator
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from modelswap_engine.protocol.errors import PublishFailed
from modelswap_engine.publishing import objects
from modelswap_engine.publishing.mounted import MountedPlace
from modelswap_engine.publishing.objects import ObjectPlace
from modelswap_engine.publishing.packing import PackFile
from modelswap_engine.sources.objects import ObjectFolder

PIECE = 1 << 20


async def given(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(PIECE)


@pytest.mark.parametrize("at_once", [8 * PIECE, PIECE], ids=["whole", "in parts"])
@pytest.mark.parametrize("count", [0, 2, 4])
async def test_a_store_keeps_no_part_for_the_whole(monkeypatch: pytest.MonkeyPatch, at_once: int, count: int) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", at_once)
    store = MemoryStore()
    with pytest.raises(
        PublishFailed, match=f"x.delta: {count * PIECE} bytes were to be written of a file of {3 * PIECE}"
    ):
        await ObjectPlace(ObjectFolder("s3://b/x", store)).put(
            PackFile(name="x.delta", size=3 * PIECE, content=""), given(count)
        )
    assert not obstore.list(store).collect()


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_a_volume_keeps_no_part_for_the_whole(tmp_path: Path, count: int) -> None:
    place = MountedPlace((tmp_path / "x").as_uri())
    with pytest.raises(PublishFailed, match=f"{count * PIECE} bytes were to be written of a file of {3 * PIECE}"):
        await place.put(PackFile(name="x.delta", size=3 * PIECE, content=""), given(count))
    await place.close()
    assert not list(tmp_path.iterdir())
