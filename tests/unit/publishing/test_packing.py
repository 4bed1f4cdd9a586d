"""The pack that a version is published with: when there is one, that pods use it, and that nothing depends on it."""

import os
from pathlib import Path

import numpy as np
import obstore
import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.delta import build
from modelswap_engine.delta.layout import pack_name
from modelswap_engine.protocol.errors import (
    InsufficientDisk,
    ModelswapError,
    PublishFailed,
)
from modelswap_engine.publishing.packing import SHARE
from modelswap_engine.publishing.tensors import TensorsVersion
from tests.support.checkpoints import CONFIG, SINGLE, Tensor, write_checkpoint
from tests.support.deltas import opened
from tests.support.published import Stores

ONE, TWO = "s3://bucket/chat/1.0", "s3://bucket/chat/1.1"
COUNT = 700_000
"""Elements of a tensor of two bytes each: more than half a MiB."""


def trained(*, seed: int, share: float = 0.0) -> dict[str, Tensor]:
    """Weights, of which a share of the elements was moved by a step."""
    random = np.random.default_rng(seed)
    found: dict[str, Tensor] = {"same": ("U8", (3,), b"abc")}
    for number in range(2):
        values = np.random.default_rng(number).standard_normal(COUNT, np.float32)
        data = (values.view(np.uint32) >> 16).astype(np.uint16)
        data[random.random(COUNT) < share] += np.uint16(1)
        found[f"w{number}"] = ("BF16", (COUNT,), data.tobytes())
    return found


NBYTES = 4 * COUNT


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path / "pods")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "old", trained(seed=1))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "new", trained(seed=2, share=0.02), shards=2)


def name_for(folder: Path) -> str:
    return pack_name(build_manifest(folder).digest)


async def test_a_pod_with_the_base_fetches_the_pack_and_another_the_tensors(
    stores: Stores, old: Path, new: Path
) -> None:
    await stores.publish(old, ONE)
    done = await stores.publish(new, TWO, base=ONE, pack="wanted")
    assert done.pack is not None
    assert done.pack.dense_bytes == NBYTES
    assert 0 < done.pack.bytes < NBYTES / 30
    assert done.pack.bytes == obstore.head(stores.store(TWO), name_for(old))["size"]
    sizes = [meta["size"] for meta in obstore.list(stores.store(TWO)).collect() if meta["path"] != MANIFEST_FILE]
    assert (done.bytes_sent, done.files_sent) == (sum(sizes), len(sizes))
    assert [name for _, name in stores.put][-2:] == [name_for(old), MANIFEST_FILE], "before the manifest"
    whole = await stores.fetched(TWO)
    assert (whole[0], stores.travelled) == (done.digest, NBYTES + 3)
    assert await stores.fetched(TWO, after=ONE) == whole
    assert stores.travelled <= done.pack.bytes


async def test_tensors_in_memory_are_packed_too(stores: Stores, old: Path) -> None:
    sides = {"config.json": (old / "config.json").read_bytes()}
    first, second = (
        {name: np.frombuffer(data, np.uint8) for name, (_, _, data) in trained(seed=seed, share=0.02 * seed).items()}
        for seed in (0, 1)
    )
    await stores.publish(TensorsVersion(first, side_files=sides), ONE)
    done = await stores.publish(TensorsVersion(second, side_files=sides), TWO, base=ONE, pack="wanted")
    assert done.pack is not None
    assert 0 < done.pack.bytes < NBYTES / 20
    assert await stores.fetched(TWO) == await stores.fetched(TWO, after=ONE)
    assert stores.travelled <= done.pack.bytes


async def test_a_pack_that_is_not_much_smaller_is_left_out(
    stores: Stores, tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PROBE_BYTES", 1 << 20)
    noise: dict[str, Tensor] = {f"w{number}": ("BF16", (COUNT,), os.urandom(2 * COUNT)) for number in range(2)}
    await stores.publish(old, ONE)
    other = write_checkpoint(tmp_path / "noise", noise)
    done = await stores.publish(other, TWO, base=ONE, pack="wanted")
    assert done.pack is not None
    assert (done.pack.bytes, "more than half" in done.pack.missing) == (0, True)
    assert not {name for name in stores.names(TWO) if name.endswith(".delta")}
    forced = await stores.publish(other, TWO + "-forced", base=ONE, pack="required")
    assert forced.pack is not None
    assert forced.pack.bytes > SHARE * NBYTES
    small = write_checkpoint(tmp_path / "small", trained(seed=1) | {"same": ("U8", (3,), b"xyz")})
    assert (await stores.publish(small, TWO + "-small", base=ONE, pack="wanted")).pack is not None
    assert not {name for name in stores.names(TWO + "-small") if name.endswith(".delta")}


async def test_without_a_pack_the_version_is_published_and_with_one_asked_for_it_is_not(
    stores: Stores, old: Path, new: Path
) -> None:
    await stores.publish(old, ONE)
    stores.failing = {name_for(old)}
    with pytest.raises(PublishFailed):
        await stores.publish(new, TWO, base=ONE, pack="required")
    with pytest.raises(ModelswapError):
        await stores.fetched(TWO)
    done = await stores.publish(new, TWO, base=ONE, pack="wanted")
    assert done.pack is not None
    assert "broke off" in done.pack.missing
    assert (await stores.fetched(TWO, after=ONE))[0] == done.digest


async def test_a_pack_that_is_there_is_not_made_again(
    stores: Stores, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stores.publish(old, ONE)
    stores.failing = {MANIFEST_FILE}
    with pytest.raises(PublishFailed):
        await stores.publish(new, TWO, base=ONE, pack="wanted")
    stores.failing, stores.put = set(), []

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("modelswap_engine.publishing.packing.build", never)
    done = await stores.publish(new, TWO, base=ONE, pack="wanted")
    assert done.pack is not None
    assert done.pack.already_there
    assert [name for _, name in stores.put] == [MANIFEST_FILE]


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Two versions, whose first side file is the same; the second and the weights differ."""
    old, new = (
        write_checkpoint(
            tmp_path / f"sides-{seed}",
            trained(seed=seed, share=0.02 * seed),
            side_files={"config.json": CONFIG, "tokenizer_config.json": {"version": seed}},
        )
        for seed in (0, 1)
    )
    return old, new


async def test_a_pack_with_a_side_file_that_did_not_change_is_whole(stores: Stores, sides: tuple[Path, Path]) -> None:
    old, new = sides
    await stores.publish(old, ONE)
    done = await stores.publish(new, TWO, base=ONE, pack="required")
    assert done.pack is not None
    data = bytes(obstore.get(stores.store(TWO), name_for(old)).bytes())
    assert len(data) == done.pack.bytes
    pack = opened(data)
    packed = {side.name: side for side in pack.header.side_files if side.packed}
    assert packed.keys() == {"tokenizer_config.json"}
    for name, side in packed.items():
        assert pack.side_file(side) == (new / name).read_bytes()


async def test_a_pack_that_was_cut_is_made_again(stores: Stores, sides: tuple[Path, Path]) -> None:
    old, new = sides
    await stores.publish(old, ONE)
    stores.failing = {MANIFEST_FILE}
    with pytest.raises(PublishFailed):
        await stores.publish(new, TWO, base=ONE, pack="wanted")
    stores.failing = set()
    there = obstore.get(stores.store(TWO), name_for(old))
    note, data = there.attributes, bytes(there.bytes())
    obstore.put(stores.store(TWO), name_for(old), data[:-20], attributes=note, use_multipart=False)
    done = await stores.publish(new, TWO, base=ONE, pack="wanted")
    assert done.pack is not None
    assert (done.pack.already_there, done.pack.bytes) == (False, len(data))
    assert bytes(obstore.get(stores.store(TWO), name_for(old)).bytes()) == data


async def test_a_full_disk_costs_the_pack_only(
    stores: Stores, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    await stores.publish(old, ONE)
    monkeypatch.setattr("modelswap_engine.checkpoint.saving.write_at", full)
    with pytest.raises(InsufficientDisk, match="No space left"):
        await stores.publish(new, TWO, base=ONE, pack="required")
    done = await stores.publish(new, TWO, base=ONE, pack="wanted")
    assert done.pack is not None
    assert "No space left" in done.pack.missing


async def test_a_base_that_was_damaged_is_found_out(stores: Stores, old: Path, new: Path) -> None:
    await stores.publish(old, ONE)
    data = bytearray(obstore.get(stores.store(ONE), SINGLE).bytes())
    data[-5] ^= 1
    obstore.put(stores.store(ONE), SINGLE, bytes(data))
    done = await stores.publish(new, TWO, base=ONE, pack="wanted")
    assert done.pack is not None
    assert f"its bytes in {ONE} hash to" in done.pack.missing
    assert not {name for name in stores.names(TWO) if name.endswith(".delta")}
