"""Folders for engines: what is in them was proved on the way, and what is not right never gets there."""

import hashlib
import os
import threading
from pathlib import Path

import msgspec
import pytest

from modelswap_engine.backends.external.folder import Join, joined_sums, point, stamp_of, write_folder
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.protocol.errors import (
    Cancelled,
    ChecksFailed,
    InvalidCheckpoint,
    ManifestMismatch,
    ModelswapError,
    SourceChanged,
    SourceUnreadable,
    UnsupportedChange,
)
from tests.support.checkpoints import Tensor, write_checkpoint
from tests.support.orders import ranges

TENSORS: dict[str, Tensor] = {
    "mask": ("U8", (3,), b"\x01\x00\x01"),
    "q": ("BF16", (2, 2), b"qqqqqqqq"),
    "k": ("BF16", (1, 2), b"kkkk"),
    "v": ("BF16", (1, 2), b"vvvv"),
    "norm": ("F32", (2,), bytes(8)),
}
JOINS = {"qkv": Join(("q", "k", "v")), "padded": Join(("norm",), zeros=5), "twin": Join(("norm",))}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", TENSORS)


def write(tmp_path: Path, tensors: tuple[TensorRange, ...], *, stop: threading.Event | None = None) -> Path:
    side = tmp_path / "side"
    side.mkdir(exist_ok=True)
    (side / "config.json").write_text("{}")
    destination = tmp_path / "folders" / "one"
    write_folder(
        destination,
        tensors=tensors,
        side_files=side,
        joins=JOINS,
        notes={"note": b"n"},
        stop=stop or threading.Event(),
    )
    return destination


def test_it_holds_the_tensors_the_side_files_and_the_notes(source: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, ranges(source))
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "note"]
    written = {item.name: (item.dtype, item.shape, item.sha256) for item in ranges(folder)}
    assert written == {item.name: (item.dtype, item.shape, item.sha256) for item in ranges(source)}


def test_every_tensor_begins_at_a_multiple_of_its_elements(source: Path, tmp_path: Path) -> None:
    size = {"U8": 1, "BF16": 2, "F32": 4}
    assert all(item.offset % size[item.dtype] == 0 for item in ranges(write(tmp_path, ranges(source))))


def test_it_says_where_its_tensors_lie_and_what_joins_hash_to(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "out"
    stop = threading.Event()
    written = write_folder(destination, tensors=ranges(source), side_files=source, joins=JOINS, notes={}, stop=stop)
    assert sorted(written.tensors, key=lambda item: item.name) == list(ranges(destination))
    parts = {"qkv": b"qqqqqqqqkkkkvvvv", "padded": bytes(13), "twin": bytes(8)}
    joined = {key: hashlib.sha256(data).hexdigest() for key, data in parts.items()}
    assert written.joined == joined
    assert joined_sums({item.name: item for item in ranges(source)}, JOINS, stop=stop) == joined


def test_a_folder_that_was_written_to_since_is_told_apart(source: Path, tmp_path: Path) -> None:
    def made(name: str) -> tuple[Path, tuple[int, ...]]:
        written = write_folder(
            tmp_path / name, tensors=ranges(source), side_files=source, joins={}, notes={}, stop=threading.Event()
        )
        return tmp_path / name / "model.safetensors", written.stamp

    file, stamp = made("kept")
    assert stamp_of(file.parent) == stamp != ()
    times, data = file.stat(), file.read_bytes()
    file.write_bytes(data[:-1] + b"!")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # and the writer hides it
    assert stamp_of(file.parent) != stamp
    file, stamp = made("replaced")
    file.with_suffix(".new").write_bytes(data)
    file.with_suffix(".new").replace(file)
    assert stamp_of(file.parent) != stamp
    file.unlink()
    assert stamp_of(file.parent) == ()


def _nan(source: Path) -> tuple[TensorRange, ...]:
    nan = {**TENSORS, "k": ("BF16", (1, 2), b"\x00\x00\xc0\x7f")}
    return ranges(write_checkpoint(source, nan))


def _edited(name: str, **changes: object) -> "object":
    def edit(source: Path) -> tuple[TensorRange, ...]:
        return tuple(msgspec.structs.replace(i, **changes) if i.name == name else i for i in ranges(source))

    return edit


def _cut(source: Path) -> tuple[TensorRange, ...]:
    found = ranges(source)
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return found


def _link(source: Path) -> tuple[TensorRange, ...]:
    found, file = ranges(source), source / "model.safetensors"
    file.rename(source / "elsewhere")
    file.symlink_to(source / "elsewhere")
    return found


BAD = {
    "other bytes": (_edited("k", sha256="0" * 64), ManifestMismatch),
    "not finite": (_nan, ChecksFailed),
    "cut short": (_cut, SourceChanged),
    "another size": (_edited("k", shape=(3, 2)), InvalidCheckpoint),
    "a link in its place": (_link, SourceUnreadable),
    "in no file": (_edited("k", path=""), UnsupportedChange),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_right_leaves_no_folder(case: str, source: Path, tmp_path: Path) -> None:
    prepare, error = BAD[case]
    with pytest.raises(error):
        write(tmp_path, prepare(source))
    assert not list((tmp_path / "folders").iterdir())


def test_it_can_be_ended(source: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        write(tmp_path, ranges(source), stop=stop)
    assert not list((tmp_path / "folders").iterdir())


def test_a_link_moves_from_one_folder_to_the_next(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        point(tmp_path / "link", folder)
        assert (tmp_path / "link").readlink() == folder
    with pytest.raises(ModelswapError, match="nowhere"):
        point(tmp_path / "nowhere" / "link", one)
