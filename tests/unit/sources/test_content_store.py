"""The content store: what appears is proved, what is held stays, what a crash leaves goes."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modelswap_engine.protocol.errors import InsufficientDisk
from tests.support.stores import on_the_way, opened, sha256


def test_a_blob_written_in_pieces_appears_when_it_hashes_to_its_name(tmp_path: Path) -> None:
    store, data = opened(tmp_path), bytes(range(200))
    (incoming,) = store.expect([(sha256(data), len(data))])
    incoming.write(100, data[100:])
    assert not incoming.complete
    incoming.write(0, data[:100])
    assert incoming.complete
    assert store.missing([sha256(data)])
    assert store.accept(incoming) == sha256(data)
    assert not store.missing([sha256(data)])
    assert store.path(sha256(data)).read_bytes() == data
    assert store.path(sha256(data)).stat().st_mode & 0o777 == 0o444


def test_other_bytes_do_not_appear_and_can_be_written_again(tmp_path: Path) -> None:
    store, data = opened(tmp_path), b"right"
    (incoming,) = store.expect([(sha256(data), 5)])
    incoming.write(0, b"wrong")
    assert store.accept(incoming) == sha256(b"wrong")
    assert store.missing([sha256(data)])
    assert store.missing([sha256(b"wrong")])
    incoming.write(0, data)
    assert store.accept(incoming) == sha256(data)
    assert store.path(sha256(data)).read_bytes() == data


def test_a_hash_that_is_not_known_yet_is_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    (incoming,) = store.expect([("", 3)])
    incoming.write(0, b"abc")
    assert store.accept(incoming) == sha256(b"abc")
    assert not store.missing([sha256(b"abc")])


def test_an_empty_blob_is_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(sha256(b""), b"")
    assert store.path(sha256(b"")).read_bytes() == b""


def test_it_is_there_after_a_restart_and_what_was_on_its_way_is_not(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(sha256(b"kept"), b"kept")
    (incoming,) = store.expect([(sha256(b"lost"), 4)])
    incoming.write(0, b"lo")
    del store  # which ends what marks it as alive
    again = opened(tmp_path)
    assert again.missing([sha256(b"kept"), sha256(b"lost")]) == {sha256(b"lost")}
    assert not on_the_way(tmp_path)


def test_the_longest_unused_goes_first_and_what_is_held_stays(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=10)
    blobs = [b"aaaa", b"bbbb", b"cccc"]
    store.put(sha256(blobs[0]), blobs[0])
    store.hold("v1", [sha256(blobs[0])])
    store.put(sha256(blobs[1]), blobs[1])
    store.put(sha256(blobs[2]), blobs[2])
    assert store.missing(map(sha256, blobs)) == {sha256(blobs[1])}
    store.hold("v2", [sha256(blobs[2])])
    with pytest.raises(InsufficientDisk) as refused:
        store.expect([(sha256(blobs[1]), 4)])
    assert "in use" in refused.value.message
    assert store.missing(map(sha256, blobs)) == {sha256(blobs[1])}, "nothing goes for what does not fit anyway"
    store.let_go("v1")
    store.put(sha256(blobs[1]), blobs[1])
    assert store.missing(map(sha256, blobs)) == {sha256(blobs[0])}


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=8)
    for data in (b"aaaa", b"bbbb"):
        store.put(sha256(data), data)
    store.hold("used", [sha256(b"aaaa")])
    again = opened(tmp_path, limit=8)
    again.put(sha256(b"cccc"), b"cccc")
    assert again.missing([sha256(b"aaaa"), sha256(b"bbbb")]) == {sha256(b"bbbb")}


def test_what_is_on_its_way_counts(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=10)
    first = store.expect([(sha256(b"x" * 6), 6)])
    with pytest.raises(InsufficientDisk):
        store.expect([(sha256(b"y" * 6), 6)])
    store.give_up(first)
    assert store.expect([(sha256(b"y" * 6), 6)])


def test_the_disk_itself_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**8, 10**8))
    with pytest.raises(InsufficientDisk):
        store.expect([(sha256(b""), 10**8)])


def test_damage_is_found_and_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for data in (b"good", b"flip", b"gone"):
        store.put(sha256(data), data)
    store.path(sha256(b"flip")).chmod(0o600)
    store.path(sha256(b"flip")).write_bytes(b"flop")
    store.path(sha256(b"gone")).unlink()
    names = [sha256(data) for data in (b"good", b"flip", b"gone")]
    assert set(store.damaged(names)) == set(names[1:])
    assert store.missing(names) == set(names[1:])


def test_an_open_blob_is_read_to_its_end_though_it_goes(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=8)
    store.put(sha256(b"aaaa"), b"aaaa")
    reading = store.open_blob(sha256(b"aaaa"))
    assert reading is not None
    with reading:
        store.put(sha256(b"bbbbbbbb"), b"bbbbbbbb")
        assert store.missing([sha256(b"aaaa")])
        assert reading.read() == b"aaaa"
    assert store.open_blob(sha256(b"aaaa")) is None
    assert store.open_blob("../../etc/passwd") is None


def test_what_is_not_complete_cannot_be_opened(tmp_path: Path) -> None:
    store = opened(tmp_path)
    (incoming,) = store.expect([(sha256(b"aaaa"), 4)])
    incoming.write(0, b"aaaa")
    assert store.open_blob(sha256(b"aaaa")) is None, "it has not been proved"
    store.accept(incoming)
    assert store.open_blob(sha256(b"aaaa")) is not None


def test_a_file_is_not_closed_under_who_writes_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor could be another file's by then; and nothing is left of what was given up."""
    store, writing, go_on, written = opened(tmp_path), threading.Event(), threading.Event(), os.pwrite

    def slowly(fd: int, data: memoryview, at: int) -> int:
        writing.set()
        assert go_on.wait(10)
        return written(fd, data, at)

    monkeypatch.setattr(os, "pwrite", slowly)
    (incoming,) = store.expect([(sha256(b"aaaa"), 4)])
    with ThreadPoolExecutor() as pool:
        work = pool.submit(incoming.write, 0, b"aa")
        assert writing.wait(10)
        store.give_up([incoming])
        go_on.set()
        work.result(10)
        incoming.write(2, b"aa")
    assert not on_the_way(tmp_path)


def test_what_was_written_is_counted_against_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    (incoming,) = store.expect([("", 10**6)])
    incoming.write(0, bytes(10**6 - 10))
    free = 64 * 2**20 + 20  # what is spared, and a little more than what is still to come
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    store.put(sha256(b"small"), b"small")
    with pytest.raises(InsufficientDisk):
        store.expect([("", 20)])
