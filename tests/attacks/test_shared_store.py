"""A neighbour at a node's folder of blobs who does what it likes to files: it costs fetches, never a wrong byte."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modelswap_engine.protocol.errors import InsufficientDisk, ModelswapError
from modelswap_engine.store.content import ContentStore
from tests.support.stores import Neighbour, on_the_way, opened, sha256

RIGHT = bytes(range(256)) * 64
NAME = sha256(RIGHT)


def truncated(path: Path) -> None:
    os.truncate(path, len(RIGHT) // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def rewritten(path: Path) -> None:
    """Same length, and the times put back."""
    before = path.stat()
    path.chmod(0o600)
    path.write_bytes(RIGHT[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def longer(path: Path) -> None:
    path.chmod(0o600)
    with path.open("ab") as stream:
        stream.write(b"!")


def replaced(path: Path) -> None:
    path.unlink()
    path.write_bytes(RIGHT[::-1])


def linked(path: Path) -> None:
    """To a file that holds something else later."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def circular(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def foldered(path: Path) -> None:
    path.unlink()
    (path / "deep" / "er").mkdir(parents=True)
    (path / "deep" / "file").write_bytes(RIGHT)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def removed(path: Path) -> None:
    path.unlink()


def sparse(path: Path) -> None:
    """It would take hours to read a file of so many zeros, so it is not read."""
    path.chmod(0o600)
    os.truncate(path, 1 << 42)


TRICKS = [truncated, emptied, rewritten, longer, sparse, replaced, linked, circular, foldered, piped, removed]


def no_space(fd: int, data: object, at: int) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def reads(store: ContentStore) -> bytes | None:
    store.look({NAME: len(RIGHT)})
    stream = store.open_blob(NAME)
    if stream is None:
        return None
    with stream:
        return stream.read()


@pytest.mark.parametrize("trick", TRICKS)
def test_what_was_tampered_with_is_not_read_and_can_be_brought_again(
    tmp_path: Path, trick: Callable[[Path], None]
) -> None:
    ours, fresh = opened(tmp_path, shared=True), opened(tmp_path, shared=True)
    ours.hold("v1", [NAME])
    ours.put(NAME, RIGHT)
    trick(ours.path(NAME))
    assert ours.open_blob(NAME) is None, "it is another file than the one that was proved"
    assert reads(fresh) is None
    assert reads(ours) is None
    for store in (ours, fresh):
        store.put(NAME, RIGHT)
        assert reads(store) == RIGHT


@pytest.mark.parametrize("trick", [truncated, rewritten, replaced, linked, foldered, piped, removed])
def test_what_is_on_its_way_is_proved_where_it_lands(tmp_path: Path, trick: Callable[[Path], None]) -> None:
    store = opened(tmp_path, shared=True)
    (incoming,) = store.expect([(NAME, len(RIGHT))])
    incoming.write(0, RIGHT)
    (file,) = on_the_way(tmp_path)
    trick(file)
    try:
        store.accept(incoming)
    except ModelswapError:
        pass
    finally:
        store.give_up([incoming])
    assert reads(store) in {None, RIGHT}
    store.put(NAME, RIGHT)
    assert reads(store) == RIGHT


def test_what_others_write_between_our_pieces_is_seen(tmp_path: Path) -> None:
    store = opened(tmp_path, shared=True)
    (incoming,) = store.expect([(NAME, len(RIGHT))])
    incoming.write(0, RIGHT[:100])
    with incoming.path.open("r+b") as stream:
        stream.write(b"wrong")
    incoming.write(100, RIGHT[100:])
    with pytest.raises(ModelswapError, match="somebody else wrote"):
        store.accept(incoming)
    assert store.missing([NAME])


def test_a_file_without_end_in_the_place_of_a_held_blob_takes_no_room_from_it(tmp_path: Path) -> None:
    ours = opened(tmp_path, limit=2 * len(RIGHT), shared=True)
    ours.hold("v1", [NAME])
    ours.put(NAME, RIGHT)
    sparse(ours.path(NAME))
    assert reads(ours) is None
    ours.put(NAME, RIGHT)
    assert reads(ours) == RIGHT


@pytest.mark.parametrize("name", ["blobs", f"blobs/{NAME[:2]}"])
def test_nothing_is_removed_through_a_link_in_a_folders_place(tmp_path: Path, name: str) -> None:
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store = opened(folder, limit=len(RIGHT), shared=True)
    store.put(NAME, RIGHT)
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    (file,) = (path for path in elsewhere.rglob("*") if path.is_file())
    rewritten(file)
    store.look({NAME: len(RIGHT)})
    store.damaged([NAME])
    assert store.missing([NAME])
    with contextlib.suppress(ModelswapError):
        store.put(sha256(RIGHT[1:]), RIGHT[1:])
    assert file.exists()


def test_what_lies_behind_a_link_in_a_folders_place_is_not_here_and_takes_no_room(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store = opened(folder, limit=len(RIGHT), shared=True)
    store.put(NAME, RIGHT)
    store.path(NAME).parent.rename(elsewhere)
    store.path(NAME).parent.symlink_to(elsewhere)
    assert reads(store) is None
    store.put(sha256(RIGHT[1:]), RIGHT[1:])
    assert not store.missing([sha256(RIGHT[1:])])


def test_a_link_in_the_place_of_what_comes_leads_nowhere(tmp_path: Path) -> None:
    store, ours = opened(tmp_path / "store", shared=True), tmp_path / "journal"
    ours.write_bytes(RIGHT)
    ours.chmod(0o600)
    (incoming,) = store.expect([(NAME, len(RIGHT))])
    incoming.write(0, RIGHT)
    incoming.path.unlink()
    incoming.path.symlink_to(ours)
    with pytest.raises(ModelswapError):
        store.accept(incoming)
    assert ours.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("trick", [foldered, piped, removed, circular, emptied])
@pytest.mark.parametrize("name", ["lock", "pins"])
def test_who_breaks_anothers_marks_harms_nobodys_bytes(
    tmp_path: Path, name: str, trick: Callable[[Path], None]
) -> None:
    """At worst a blob that was held has to be fetched again."""
    ours, other = opened(tmp_path, limit=len(RIGHT), shared=True), opened(tmp_path, limit=len(RIGHT), shared=True)
    ours.hold("v1", [NAME])
    ours.put(NAME, RIGHT)
    for file in (tmp_path / "members").glob(f"*/{name}"):
        trick(file)
    other.look({NAME: len(RIGHT)})
    other.hold("v2", [NAME])
    assert reads(other) == RIGHT
    ours.hold("v1", [NAME])
    ours.put(NAME, RIGHT)
    assert reads(ours) == RIGHT


def test_pins_that_never_end_are_not_read_to_their_end(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=len(RIGHT), shared=True)
    with Neighbour(tmp_path) as neighbour:
        neighbour.call("hold", "v1", ["0" * 64])
        (pins,) = (tmp_path / "members").glob("*/pins")
        os.truncate(pins, 1 << 42)
        store.put(NAME, RIGHT)
    assert reads(store) == RIGHT


@pytest.mark.parametrize("name", ["blobs", f"blobs/{NAME[:2]}", "members"])
def test_nothing_is_written_through_a_link_in_a_folders_place(tmp_path: Path, name: str) -> None:
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    opened(folder, shared=True)
    if (folder / name).exists():
        (folder / name).rename(folder / "moved")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ModelswapError, match=r"not a folder|Not a directory"):
        opened(folder, shared=True).put(NAME, RIGHT)
    assert not list(elsewhere.iterdir())


def test_junk_is_neither_read_nor_in_the_way(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=2 * len(RIGHT), shared=True)
    store.put(NAME, RIGHT)
    part = store.path(NAME).parent
    (part / "readme").write_text("not a blob")
    (tmp_path / "blobs" / "file").write_text("not a folder")
    (tmp_path / "members" / "file").write_text("not a member")
    os.mkfifo(part / ("0" * 64))
    (part / ("1" * 64)).mkdir()
    again = opened(tmp_path, limit=2 * len(RIGHT), shared=True)
    again.look({NAME: len(RIGHT), "0" * 64: 0, "1" * 64: 0})
    assert again.missing([NAME, "0" * 64, "1" * 64]) == {"0" * 64, "1" * 64}
    again.put(sha256(b"more"), b"more")


def test_who_fills_the_disk_gets_a_refusal_and_no_evicted_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, shared=True)
    store.hold("v1", [NAME])
    store.put(NAME, RIGHT)
    (incoming,) = store.expect([("", 8)])
    monkeypatch.setattr(os, "pwrite", no_space)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    with pytest.raises(InsufficientDisk), store.writing():
        incoming.write(0, b"12345678")
    store.give_up([incoming])
    with pytest.raises(InsufficientDisk):
        store.expect([("", 8)])
    assert reads(store) == RIGHT


def test_a_neighbour_that_is_stopped_holds_nobody_up_who_has_all_it_needs(tmp_path: Path) -> None:
    """Reading what was proved takes no lock."""
    store = opened(tmp_path, shared=True)
    store.put(NAME, RIGHT)
    with opened(tmp_path, shared=True)._members.alone():
        assert reads(store) == RIGHT
