"""Packs between folders: what they hold, how small they are, and what is left behind when something goes wrong."""

import errno
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, decode
from modelswap_engine.delta.build import build_pack
from modelswap_engine.delta.coding import BLOCK_BYTES
from modelswap_engine.delta.folder import apply_pack
from modelswap_engine.delta.local import Folder, opened_pack
from modelswap_engine.delta.pack import WINDOW_BYTES, Step, apply, open_pack
from modelswap_engine.protocol.errors import (
    Busy,
    Cancelled,
    DigestMismatch,
    InsufficientDisk,
    InvalidDelta,
    ManifestMismatch,
    SourceChanged,
    SourceNotFound,
)
from tests.support.checkpoints import CONFIG, SINGLE, Tensor
from tests.support.deltas import MemoryRanges, folder_of, made, opened, pack_of, reader, written

COUNT = 3 * BLOCK_BYTES // 2 + 1000
"""Elements of a tensor of three blocks and a bit, two bytes each."""


def weights(seed: int = 0) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
    values = np.random.default_rng(seed).standard_normal(COUNT, np.float32) * 0.02
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def moved(share: float, *, steps: bool = False) -> tuple[bytes, bytes]:
    """Return weights, and the same with some elements that are others: any, or one step away in their last place."""
    random = np.random.default_rng(1)
    old = weights()
    new = old.copy()
    where = random.random(COUNT) < share
    new[where] += random.choice(np.array([1, 65535], np.uint16), COUNT)[where] if steps else np.uint16(0)
    if not steps:
        new[where] = random.integers(0, 65536, COUNT, np.uint16)[where]
    return old.tobytes(), new.tobytes()


def tensor(data: bytes) -> dict[str, Tensor]:
    return {"w": ("BF16", (len(data) // 2,), data)}


@pytest.mark.parametrize(
    ("share", "steps", "asked"), [(0.01, False, 30), (0.03, False, 12), (0.01, True, 100), (0.6, True, 6)]
)
def test_a_pack_is_small_where_few_elements_change(tmp_path: Path, share: float, steps: bool, asked: int) -> None:
    old, new = moved(share, steps=steps)
    pack = opened(pack_of(tmp_path / "p", tensor(old), tensor(new)))
    (entry,) = pack.header.tensors
    assert entry.coding == ("sparse" if share < 0.5 else "difference")
    assert entry.changed == pytest.approx(share * COUNT, rel=0.02)
    assert asked * pack.ranges.size <= len(new)
    assert made(pack, "w", old) == new


def test_what_is_no_number_is_packed_as_exclusive_or(tmp_path: Path) -> None:
    """Weights of four bits, eight to a word, of which a tenth are others: a difference would carry into neighbours."""
    random = np.random.default_rng(3)
    old = random.integers(0, 1 << 32, COUNT, np.uint32)
    new = old.copy()
    for shift in range(0, 32, 4):
        where = np.flatnonzero(random.random(COUNT) < 0.1)
        new[where] ^= random.integers(1, 16, len(where), np.uint32) << np.uint32(shift)
    data = {"w": ("I32", (COUNT,), new.tobytes())}
    pack = opened(pack_of(tmp_path / "p", {"w": ("I32", (COUNT,), old.tobytes())}, data))
    (entry,) = pack.header.tensors
    assert entry.coding == "xor"
    assert entry.size < entry.nbytes / 3
    assert made(pack, "w", old.tobytes()) == data["w"][2]


def test_what_has_nothing_in_common_takes_no_more_than_itself(tmp_path: Path) -> None:
    noise = os.urandom(2 * BLOCK_BYTES)
    for old, new in ((noise, os.urandom(len(noise))), (weights().tobytes(), weights(seed=2).tobytes())):
        (entry,) = opened(pack_of(tmp_path / str(len(new)), tensor(old), tensor(new))).header.tensors
        assert entry.size <= len(new) + 5 * 4
        assert entry.coding == ("raw" if new is not noise and len(new) == len(noise) else "planes")


def test_a_tensor_is_read_and_made_in_windows(tmp_path: Path) -> None:
    old, new = os.urandom(5 * BLOCK_BYTES), os.urandom(5 * BLOCK_BYTES)
    ranges = MemoryRanges(pack_of(tmp_path / "p", tensor(old), tensor(new)))
    pack = open_pack(ranges)
    assert len(ranges.read) == 2
    header_bytes = sum(count for _, count in ranges.read)
    pieces: list[int] = []
    apply([Step(pack, pack.entries["w"])], base=reader(old), write=lambda piece: pieces.append(len(piece)))
    assert max(count for _, count in ranges.read) <= WINDOW_BYTES
    assert max(pieces) == BLOCK_BYTES
    assert sum(count for _, count in ranges.read) == ranges.size == header_bytes + pack.entries["w"].size


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    def peak(blocks: int) -> int:
        old = bytearray(blocks * BLOCK_BYTES)
        new = bytearray(old)
        new[::200] = b"!" * len(new[::200])
        pack = opened(pack_of(tmp_path / str(blocks), tensor(bytes(old)), tensor(bytes(new))))
        read = reader(bytes(old))
        tracemalloc.start()
        try:
            apply([Step(pack, pack.entries["w"])], base=read, write=len)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(9) < peak(3) + (1 << 20)


OLD: dict[str, Tensor] = {"a": ("BF16", (300,), b"abcdef" * 100), "b": ("U8", (2,), b"xy"), "c": ("U8", (), b"c")}
NEW: dict[str, Tensor] = {"a": ("BF16", (300,), b"abcdEf" + b"abcdef" * 99), "c": OLD["c"], "d": ("F32", (0, 4), b"")}
SIDES = {
    "config.json": b'{"architectures": ["Old"]}',
    "tokenizer.json": b'{"vocab": 1}',
    "merges.txt": b"a b",
    "vocab.txt": b"v",
}
NEW_SIDES = {
    "config.json": b'{"architectures": ["New"]}',
    "tokenizer.json": SIDES["tokenizer.json"],
    "merges.txt": b"",
    "chat_template.jinja": b"hello " * 100,
}


@pytest.fixture
def old(tmp_path: Path) -> Folder:
    return written(tmp_path / "old", OLD, side_files=SIDES)


@pytest.fixture
def new(tmp_path: Path) -> Folder:
    return written(tmp_path / "new", NEW, side_files=NEW_SIDES, shards=2)


@pytest.fixture
def pack(tmp_path: Path, old: Folder, new: Folder) -> Path:
    build_pack(old, new, tmp_path / "pack")
    return tmp_path / "pack"


def test_the_header_says_what_becomes_what(pack: Path, old: Folder, new: Folder) -> None:
    with opened_pack(pack) as found:
        header = found.header
    assert (header.base.digest, header.target.digest) == (old.manifest.digest, new.manifest.digest)
    assert (header.base.bytes, header.target.bytes) == (603, 601)
    assert [(entry.name, bool(entry.base), entry.changed) for entry in header.tensors] == [
        ("a", True, 1),
        ("d", False, 0),
    ]
    assert header.removed == ("b",)
    packed = {side.name: bool(side.packed) for side in header.side_files}
    assert packed == {"config.json": True, "tokenizer.json": False, "merges.txt": False, "chat_template.jinja": True}
    assert header.dense_bytes == 600 + len(NEW_SIDES["config.json"]) + 600


def test_the_folder_that_is_made_has_all_bytes_of_the_new_version(
    tmp_path: Path, pack: Path, old: Folder, new: Folder
) -> None:
    with opened_pack(pack) as found:
        apply_pack(found, old, tmp_path / "deep/made")
    result = folder_of(tmp_path / "deep/made")
    assert result.manifest.digest == new.manifest.digest
    assert result.contents.side_files == NEW_SIDES
    shipped = decode((tmp_path / "deep/made" / MANIFEST_FILE).read_bytes())
    assert (shipped, shipped.architecture) == (result.manifest, "New")
    assert {file.name for file in (tmp_path / "deep").iterdir()} == {"made"}


def test_what_has_only_another_name_or_shape_is_not_packed(tmp_path: Path) -> None:
    data = os.urandom(5000)
    old = written(tmp_path / "old", {"w": ("U8", (5000,), data), "x": ("U8", (2,), b"ab"), "y": ("U8", (2,), b"ab")})
    new = written(
        tmp_path / "new", {"model.w": ("U8", (5000,), data), "x": ("U8", (2, 1), b"ab"), "y": ("U8", (2,), b"cd")}
    )
    header = build_pack(old, new, tmp_path / "pack")
    assert [(entry.name, entry.coding, entry.size) for entry in header.tensors] == [
        ("model.w", "same", 5), ("x", "same", 5), ("y", "raw", 7),
    ]  # fmt: skip
    with opened_pack(tmp_path / "pack") as found:
        assert apply_pack(found, old, tmp_path / "made").digest == new.manifest.digest
    assert folder_of(tmp_path / "made").manifest.digest == new.manifest.digest


def test_the_same_version_twice_makes_an_empty_pack(tmp_path: Path, old: Folder) -> None:
    again = written(tmp_path / "again", OLD, side_files=SIDES, shards=3)
    header = build_pack(old, again, tmp_path / "pack")
    assert (header.tensors, header.removed, header.dense_bytes) == ((), (), 0)
    with opened_pack(tmp_path / "pack") as found:
        assert apply_pack(found, old, tmp_path / "made").digest == old.manifest.digest


def test_a_pack_is_never_written_over_something(tmp_path: Path, old: Folder, new: Folder, pack: Path) -> None:
    before = pack.read_bytes()
    with pytest.raises(Busy, match="exists already"):
        build_pack(old, new, pack)
    with opened_pack(pack) as found, pytest.raises(Busy, match="exists already"):
        apply_pack(found, old, tmp_path / "old")
    assert pack.read_bytes() == before


def test_the_base_must_be_the_one_that_the_pack_is_for(tmp_path: Path, new: Folder, pack: Path) -> None:
    with opened_pack(pack) as found, pytest.raises(DigestMismatch, match="the base is sha256:"):
        apply_pack(found, new, tmp_path / "made")


def rewritten(folder: Folder, at: int = -1) -> Folder:
    """Damage a tensor of a folder and read it again, with the hashes of before."""
    file = folder.contents.directory / SINGLE
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    return Folder(contents=folder_of(file.parent).contents, manifest=folder.manifest, roots=folder.roots)


def test_a_base_that_is_not_what_its_manifest_says_is_found_out(tmp_path: Path, old: Folder, pack: Path) -> None:
    for at, error in ((-1, ManifestMismatch), (-9, DigestMismatch)):  # c is copied, a is made from
        with opened_pack(pack) as found, pytest.raises(error, match=r"hash(es)? to"):
            apply_pack(found, rewritten(old, at), tmp_path / "made")
        rewritten(old, at)
    assert not (tmp_path / "made").exists()


def test_nothing_is_packed_from_bytes_that_no_manifest_says(tmp_path: Path, old: Folder, new: Folder) -> None:
    with pytest.raises(ManifestMismatch, match="tensor a: its bytes in"):
        build_pack(rewritten(old, -9), new, tmp_path / "pack")
    one, other = (written(tmp_path / str(number), tensor(bytes([number]) * 2)) for number in range(2))
    with pytest.raises(ManifestMismatch, match="tensor w: its bytes in"):
        build_pack(one, rewritten(other), tmp_path / "pack")
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new", "0", "1"}


def test_a_folder_that_is_written_to_meanwhile_is_found_out(tmp_path: Path, old: Folder, new: Folder) -> None:
    with (old.contents.directory / SINGLE).open("ab") as file:
        file.write(b"?")
    with pytest.raises(SourceChanged, match=SINGLE):
        build_pack(old, new, tmp_path / "pack")


def test_a_damaged_pack_leaves_no_folder(tmp_path: Path, old: Folder, pack: Path) -> None:
    with opened_pack(pack) as found:
        at = found.data + found.entries["a"].size - 1
    data = bytearray(pack.read_bytes())
    data[at] ^= 1
    pack.write_bytes(data)
    with opened_pack(pack) as found, pytest.raises(InvalidDelta, match=r"pack: tensor 'a': bytes \d+-\d+: ") as caught:
        apply_pack(found, old, tmp_path / "made")
    assert caught.value.details["file"] == "pack"
    data[at] ^= 1
    data[-1] ^= 1
    pack.write_bytes(data)
    with opened_pack(pack) as found, pytest.raises(InvalidDelta, match=r"side file config.json: its sha256"):
        apply_pack(found, old, tmp_path / "made")
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new", "pack"}


def test_work_can_be_ended(tmp_path: Path) -> None:
    old, new = (written(tmp_path / str(number), tensor(bytes([number]) * 2)) for number in range(2))
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        build_pack(old, new, tmp_path / "pack", stop=stop)
    build_pack(old, new, tmp_path / "pack")
    with opened_pack(tmp_path / "pack") as found, pytest.raises(Cancelled):
        apply_pack(found, old, tmp_path / "made", stop=stop)
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1", "pack"}


def test_progress_ends_with_all_bytes(tmp_path: Path, old: Folder, new: Folder) -> None:
    told: list[tuple[int, int]] = []
    build_pack(old, new, tmp_path / "pack", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (600, 600)
    told.clear()
    with opened_pack(tmp_path / "pack") as found:
        apply_pack(found, old, tmp_path / "made", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (601, 601)


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, old: Folder, new: Folder, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("fsync", "pwrite"):
        monkeypatch.setattr(os, call, full)
        with pytest.raises(InsufficientDisk, match="No space left") as caught:
            build_pack(old, new, tmp_path / "other")
    assert caught.value.advice == "give the volume of the pack more room"
    with opened_pack(pack) as found, pytest.raises(InsufficientDisk, match="No space left"):
        apply_pack(found, old, tmp_path / "made")
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new", "pack"}


def test_room_is_looked_for_first(tmp_path: Path, old: Folder, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 3}))
    with opened_pack(pack) as found, pytest.raises(InsufficientDisk, match="the new folder needs"):
        apply_pack(found, old, tmp_path / "made")


def test_no_pack(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="no such file"), opened_pack(tmp_path / "none"):
        pass
    (tmp_path / "config.json").write_text(str(CONFIG))
    with pytest.raises(InvalidDelta, match=r"config.json: not a delta pack"), opened_pack(tmp_path / "config.json"):
        pass


def test_steps_that_do_not_follow_each_other_are_a_mistake_of_the_caller(tmp_path: Path) -> None:
    one = opened(pack_of(tmp_path / "1", {"t": ("U8", (1,), b"a")}, {"t": ("U8", (1,), b"b")}))
    other = opened(pack_of(tmp_path / "2", {"t": ("U8", (1,), b"c")}, {"t": ("U8", (1,), b"d")}))
    steps = [Step(one, one.entries["t"]), Step(other, other.entries["t"])]
    with pytest.raises(ValueError, match="not made from what"):
        apply(steps, base=reader(b"a"), write=len)
    with pytest.raises(ValueError, match="there is none"):
        apply(steps[:1], base=None, write=len)
