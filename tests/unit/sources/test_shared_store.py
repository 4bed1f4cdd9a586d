"""Several processes over one folder of blobs: what one brought the other finds, proves, keeps, and counts."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from modelswap_engine.protocol.errors import InsufficientDisk, SourceUnreadable
from modelswap_engine.store.members import Members
from tests.support.stores import Neighbour, on_the_way, opened, sha256

A, B, C = b"aaaa", b"bbbb", b"cccc"
NAMES = {sha256(data): 4 for data in (A, B, C)}


def test_what_one_brought_the_other_finds_once_it_is_proved(tmp_path: Path) -> None:
    one, other = opened(tmp_path, shared=True), opened(tmp_path, shared=True)
    one.put(sha256(A), A)
    assert other.missing([sha256(A)]), "nobody has looked at its bytes"
    other.look({sha256(A): 4})
    assert not other.missing([sha256(A)])
    reading = other.open_blob(sha256(A))
    assert reading is not None
    with reading:
        assert reading.read() == A


def test_nothing_in_a_shared_folder_is_believed_after_a_restart(tmp_path: Path) -> None:
    opened(tmp_path, shared=True).put(sha256(A), A)
    again = opened(tmp_path, shared=True)
    assert again.missing([sha256(A)])
    again.look({sha256(A): 4})
    assert not again.missing([sha256(A)])


def test_a_blob_that_was_written_again_is_proved_again(tmp_path: Path) -> None:
    store = opened(tmp_path, shared=True)
    for data in (A, B):
        store.put(sha256(data), data)
        store.path(sha256(data)).chmod(0o600)
    store.path(sha256(A)).write_bytes(b"AAAA")
    store.path(sha256(B)).write_bytes(B)
    assert store.open_blob(sha256(A)) is None
    store.look(NAMES)
    assert store.missing([sha256(A), sha256(B)]) == {sha256(A)}
    assert not store.path(sha256(A)).exists(), "what is wrong makes room"


@pytest.mark.parametrize("shared", [True, False])
def test_a_blob_outlives_who_is_wrong_about_its_size(tmp_path: Path, shared: bool) -> None:
    store = opened(tmp_path, shared=shared)
    store.put(sha256(A), A)
    assert store.look({sha256(A): 5}) == {sha256(A)}
    assert not store.missing([sha256(A)])
    again = opened(tmp_path, shared=shared)
    again.look({sha256(A): 5})
    assert again.look({sha256(A): 4}) == set()
    assert not again.missing([sha256(A)])


def test_between_an_earlier_process_and_a_manifest_the_hash_decides(tmp_path: Path) -> None:
    opened(tmp_path).put(sha256(A), A)
    os.truncate(opened(tmp_path).path(sha256(A)), 2)
    store = opened(tmp_path)
    assert store.look({sha256(A): 4}) == set()
    assert store.missing([sha256(A)])


@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ENOMEM])
def test_who_cannot_read_a_blob_leaves_it_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    one, other = opened(tmp_path, shared=True), opened(tmp_path, shared=True)
    one.put(sha256(A), A)
    done: Callable[..., int] = getattr(os, call)

    def refusing(what: object, *arguments: object, **options: object) -> int:
        if call == "preadv" or str(what).endswith(sha256(A)):
            raise OSError(number, os.strerror(number))
        return done(what, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refusing)
        other.look({sha256(A): 4})
        assert other.missing([sha256(A)])
        assert one.damaged([sha256(A)]) == [sha256(A)]
    for store in (one, other):
        store.look({sha256(A): 4})
        assert not store.missing([sha256(A)])


def test_what_a_neighbour_holds_stays_and_what_nobody_holds_goes(tmp_path: Path) -> None:
    one, other = opened(tmp_path, limit=8, shared=True), opened(tmp_path, limit=8, shared=True)
    one.hold("v1", [sha256(A)])
    one.put(sha256(A), A)
    one.put(sha256(B), B)
    other.put(sha256(C), C)
    one.look(NAMES)
    assert one.missing(NAMES) == {sha256(B)}
    other.hold("v2", [sha256(C)])
    with pytest.raises(InsufficientDisk):
        one.expect([(sha256(B), 4)])
    one.let_go("v1")
    other.put(sha256(B), B)
    one.look(NAMES)
    assert one.missing(NAMES) == {sha256(A)}


def test_what_is_on_its_way_to_a_neighbour_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = opened(tmp_path, limit=10, shared=True), opened(tmp_path, limit=10, shared=True)
    coming = one.expect([("", 6)])
    with pytest.raises(InsufficientDisk):
        other.expect([("", 6)])
    one.give_up(coming)
    assert other.expect([("", 6)])


def test_the_kernel_lets_go_of_what_a_killed_process_held(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=8, shared=True)
    with Neighbour(tmp_path, limit=8) as neighbour:
        neighbour.call("hold", "v1", [sha256(A)])
        neighbour.call("put", A.hex())
        neighbour.call("begin", 4, 2)
        assert len(on_the_way(tmp_path)) == 1
        with pytest.raises(InsufficientDisk):
            store.expect([("", 4)])
    store.put(sha256(B), B)
    store.put(sha256(C), C)
    store.look(NAMES)
    assert store.missing(NAMES) == {sha256(A)}
    assert not on_the_way(tmp_path)
    assert len(list((tmp_path / "members").iterdir())) == 1


def test_a_process_that_is_killed_at_any_step_leaves_nothing_wrong(tmp_path: Path) -> None:
    """Its neighbour goes on, finds either the whole blob or none, and is not held up."""
    step, ended = 0, False
    while not ended:
        step += 1
        folder = tmp_path / str(step)
        store = opened(folder, limit=8, shared=True)
        store.put(sha256(B), B)
        ended = killed_at(step, lambda: brought_and_left(folder))  # noqa: B023 - it is called at once
        store.look(NAMES)
        assert sha256(B) not in store.missing(NAMES)
        store.put(sha256(A), A)
        store.put(sha256(C), C)
        assert sha256(C) not in store.missing(NAMES)
        assert not on_the_way(folder), step
        assert len(list((folder / "members").iterdir())) == 1, step
    assert step > 20


def brought_and_left(folder: Path) -> None:
    store = opened(folder, limit=8, shared=True)
    store.hold("v1", [sha256(A)])
    store.put(sha256(A), A)
    store.let_go("v1")


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Do work in a process that is killed before so many-th call to the file system; say whether it got to its end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    left = step

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event.startswith(("os.", "open", "fcntl.")) and event != "os.kill":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_an_emptied_folder_is_joined_again(tmp_path: Path) -> None:
    """Somebody cleaned the node while pods ran."""
    one, other = opened(tmp_path / "s", limit=8, shared=True), opened(tmp_path / "s", limit=8, shared=True)
    one.hold("v1", [sha256(A)])
    one.put(sha256(A), A)
    (tmp_path / "s").rename(tmp_path / "gone")
    one.look(NAMES)
    assert one.missing([sha256(A)])
    one.put(sha256(A), A)
    other.put(sha256(B), B)
    other.put(sha256(C), C)
    one.look(NAMES)
    assert one.missing(NAMES) == {sha256(B)}, "what it holds is known again"


def test_another_users_blobs_that_cannot_be_removed_are_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder with the sticky bit."""
    store = opened(tmp_path, limit=8, shared=True)
    for data in (A, B):
        store.put(sha256(data), data)
    unlink = os.unlink

    def refusing(path: Path | str, *, dir_fd: int | None = None) -> None:
        if Path(path).name == sha256(A):
            raise PermissionError(1, "Operation not permitted")
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refusing)
    store.put(sha256(C), C)
    store.look(NAMES)
    assert store.missing(NAMES) == {sha256(B)}


@pytest.mark.parametrize("there", [A, b"AAAA"])
def test_another_users_blob_that_cannot_be_replaced_counts_if_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bytes
) -> None:
    """As in a folder with the sticky bit, where two pods of different users fetch the same."""
    store, replace, target = opened(tmp_path, shared=True), os.replace, opened(tmp_path, shared=True).path(sha256(A))

    def refusing(path: Path, to: Path | str, **options: int) -> None:
        if Path(to).name == target.name and target.exists():
            raise PermissionError(errno.EPERM, "Operation not permitted")
        replace(path, to, **options)

    monkeypatch.setattr(os, "replace", refusing)
    monkeypatch.setattr(os, "unlink", lambda path, *, dir_fd=None: refusing(Path(), path))
    (incoming,) = store.expect([(sha256(A), 4)])
    incoming.write(0, A)
    target.parent.mkdir()
    target.write_bytes(there)
    if there == A:
        assert store.accept(incoming) == sha256(A)
        assert not store.missing([sha256(A)])
    else:
        with pytest.raises(SourceUnreadable, match=f"{target}: .*user {os.getuid()}"):
            store.accept(incoming)


def test_what_is_made_has_the_mode_of_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    store = opened(tmp_path, shared=True)
    store.put(sha256(A), A)
    folders = [entry for entry in tmp_path.rglob("*") if entry.is_dir()]
    assert {entry.stat().st_mode & 0o7777 for entry in folders} == {0o2770}
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o660


def test_who_lives_can_be_seen_by_other_users_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        opened(tmp_path, shared=True)
    finally:
        os.umask(before)
    (lock,) = (tmp_path / "members").glob("*/lock")
    assert lock.stat().st_mode & 0o777 == 0o644


def test_what_could_not_be_said_is_said_by_the_next_that_is_alone(tmp_path: Path) -> None:
    busy, one = Members(tmp_path), Members(tmp_path, patience=0)
    with one.alone():
        pass
    with busy.alone(), pytest.raises(SourceUnreadable):
        one.pin([sha256(A)])
    with one.alone():
        pass
    with busy.alone():
        assert busy.others().held == {sha256(A)}


def test_who_is_in_the_way_is_waited_for_once(tmp_path: Path) -> None:
    waited: list[float] = []
    busy, one = Members(tmp_path), Members(tmp_path, patience=1.0, pause=waited.append)
    one.pin([sha256(A)])
    with busy.alone():
        one.pin([sha256(A)])
        assert not waited, "it has been said"
        for name in (sha256(B), sha256(C)):
            with pytest.raises(SourceUnreadable):
                one.pin([name])
        assert sum(waited) == pytest.approx(1.0)
    one.pin([sha256(B)])
    with busy.alone(), pytest.raises(SourceUnreadable):
        one.pin([sha256(C)])
    assert sum(waited) == pytest.approx(2.0), "it had ended meanwhile"


def test_who_is_in_the_way_keeps_nobody_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = opened(tmp_path, shared=True)
    busy.put(sha256(A), A)
    monkeypatch.setattr(Members.__init__, "__kwdefaults__", {"patience": 0.0, "pause": lambda seconds: None})
    with busy._members.alone():
        store = opened(tmp_path, shared=True)
        store.look({sha256(A): 4})
        assert not store.missing([sha256(A)])
        with pytest.raises(SourceUnreadable, match="another process"):
            store.put(sha256(B), B)
    store.put(sha256(B), B)


def test_one_that_never_ends_is_named(tmp_path: Path) -> None:
    waited: list[float] = []
    hanging, patient = Members(tmp_path), Members(tmp_path, patience=1.0, pause=waited.append)
    with hanging.alone(), pytest.raises(SourceUnreadable, match="another process") as refused, patient.alone():
        pass
    assert "pod of the node" in refused.value.advice
    assert sum(waited) == pytest.approx(1.0)


def test_of_two_holds_at_the_same_time_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was first to say so may be the last to write it."""
    one, other = opened(tmp_path, limit=8, shared=True), opened(tmp_path, limit=8, shared=True)
    one.put(sha256(A), A)
    one.put(sha256(B), B)
    pin, begun, go_on = Members.pin, threading.Event(), threading.Event()

    def slowly(self: Members, hashes: Collection[str]) -> None:
        first = not begun.is_set()
        begun.set()
        assert not first or go_on.wait(10)
        pin(self, hashes)

    monkeypatch.setattr(Members, "pin", slowly)
    with ThreadPoolExecutor() as pool:
        holds = [pool.submit(one.hold, "v1", [sha256(A)])]
        assert begun.wait(10)
        holds.append(pool.submit(one.hold, "v2", [sha256(B)]))
        wait(holds, timeout=0.2, return_when=FIRST_COMPLETED)  # neither ends, unless one overtakes the other
        go_on.set()
        for hold in holds:
            hold.result(10)
    with pytest.raises(InsufficientDisk):
        other.expect([("", 1)])
