"""Reads of mounts that may hang: what waits for whom, and who does not."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelswap_engine.protocol.errors import SourceNotAllowed
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.threads import AT_ONCE, MountThreads
from tests.support.checkpoints import SINGLE, write_checkpoint


class Mount:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = threading.Semaphore(0)

    def read(self) -> str:
        self.asked.release()
        assert self.answers.wait(30)
        return "read"


@pytest.fixture
def mount() -> Iterator[Mount]:
    yield (made := Mount())
    made.answers.set()


async def test_who_gives_up_leaves_the_thread_behind_and_its_turn_with_it(mount: Mount) -> None:
    threads = MountThreads("mount", at_once=2)
    left = [asyncio.create_task(threads.run(mount.read)) for _ in range(2)]
    await asyncio.to_thread(mount.asked.acquire)
    await asyncio.to_thread(mount.asked.acquire)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    waiting = [asyncio.create_task(threads.run(int, str(number))) for number in range(3)]
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not mount.asked.acquire(blocking=False)
    assert not any(task.done() for task in waiting[1:])
    mount.answers.set()
    assert await asyncio.gather(*waiting[1:]) == [1, 2]


async def test_a_turn_that_comes_to_who_gives_up_right_then_goes_to_the_next(mount: Mount) -> None:
    threads = MountThreads("mount", at_once=1)
    waiting: list[asyncio.Task[int]] = []

    async def first() -> None:
        await threads.run(mount.read)
        waiting[0].cancel()  # in the very turn of the loop in which it would have gone on

    holding = asyncio.create_task(first())
    await asyncio.to_thread(mount.asked.acquire)
    waiting += [asyncio.create_task(threads.run(int, str(number))) for number in range(2)]
    await asyncio.sleep(0)
    mount.answers.set()
    async with asyncio.timeout(30):
        assert await waiting[1] == 1
    await holding
    assert waiting[0].cancelled()


async def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await MountThreads("mount").run(int, "x")


@pytest.fixture
def roots(mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two mounts with a checkpoint each; the first one hangs from the start."""
    gone, there = tmp_path / "gone", tmp_path / "there"
    for root in (gone, there):
        write_checkpoint(root / "m")
    exists = Path.exists

    def hanging(path: Path) -> bool:
        return exists(path) if not path.is_relative_to(gone) else mount.read() == "read" and exists(path)

    monkeypatch.setattr(Path, "exists", hanging)
    return gone, there


async def test_a_mount_that_hangs_keeps_no_other_from_being_read(mount: Mount, roots: tuple[Path, Path]) -> None:
    gone, there = roots
    source = FileSource(roots=[gone, there], cache=None)
    stuck = [asyncio.create_task(source.resolve((gone / "m").as_uri())) for _ in range(AT_ONCE + 30)]
    for _ in range(AT_ONCE):
        await asyncio.to_thread(mount.asked.acquire)
    async with asyncio.timeout(20):
        assert (await source.resolve((there / "m").as_uri())).manifest.total_bytes
    mount.answers.set()
    assert len({found.manifest.digest for found in await asyncio.gather(*stuck)}) == 1


async def test_what_leads_out_of_a_root_waits_for_one_that_hangs_no_longer_than_it_says(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, there = roots
    monkeypatch.setattr("modelswap_engine.sources.file.ROOT_SECONDS", 0.05)
    (there / "link").symlink_to(write_checkpoint(tmp_path / "outside"))
    source = FileSource(roots=[gone, there], cache=None)
    async with asyncio.timeout(20):
        with pytest.raises(SourceNotAllowed):
            await source.resolve((there / "link").as_uri())


async def test_a_link_may_lead_to_a_root_that_is_a_link_and_was_not_read_yet(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "real" / "m")
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "m").symlink_to(tmp_path / "real" / "m")
    write_checkpoint(tmp_path / "there" / "file")
    (tmp_path / "there" / "file" / SINGLE).unlink()
    (tmp_path / "there" / "file" / SINGLE).symlink_to(tmp_path / "real" / "m" / SINGLE)
    for name in ("m", "file"):
        source = FileSource(roots=[tmp_path / "there", tmp_path / "alias"], cache=None)
        assert (await source.resolve((tmp_path / "there" / name).as_uri())).manifest.total_bytes
