"""Reads of mounts that may hang: what waits for whom, and who does not."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.threads import AT_ONCE, MountThreads
from tests.support.checkpoints import write_checkpoint


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


async def test_a_mount_that_hangs_keeps_no_other_from_being_read(
    mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, there = tmp_path / "gone", tmp_path / "there"
    for root in (gone, there):
        write_checkpoint(root / "m")
    source = FileSource(roots=[gone, there], cache=None)
    await source.resolve((there / "m").as_uri())
    exists = Path.exists

    def hanging(path: Path) -> bool:
        return bool(mount.read()) if path.is_relative_to(gone) else exists(path)

    monkeypatch.setattr(Path, "exists", hanging)
    stuck = [asyncio.create_task(source.resolve((gone / "m").as_uri())) for _ in range(AT_ONCE + 30)]
    for _ in range(AT_ONCE):
        await asyncio.to_thread(mount.asked.acquire)
    assert (await source.resolve((there / "m").as_uri())).manifest.total_bytes
    mount.answers.set()
    assert len({found.manifest.digest for found in await asyncio.gather(*stuck)}) == 1
