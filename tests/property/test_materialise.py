"""Whoever is killed, at whichever step, leaves the old current checkpoint or the new one, and whole."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.port import Load
from tests.support.examples import examples
from tests.support.whole_folders import digest_in, folders, leftovers, order, publish

_KILLED = 99
_STEPS = ("open", "os.")  # audit events of everything that touches a file system
_LONGEST = 400


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[Load]:
    folder = tmp_path_factory.mktemp("published")
    (folder / "models").mkdir()
    return [asyncio.run(order(publish(folder / "models", number), folder)) for number in range(3)]


def killed_at(step: int, work: Callable[[], Coroutine[None, None, None]]) -> bool:
    """Do the work in a process that ends, as by SIGKILL, before a step on the file system; False when it has fewer."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, _: object) -> None:
            nonlocal count
            if event.startswith(_STEPS):
                count += 1
                if count == step:
                    os._exit(_KILLED)

        try:
            sys.addaudithook(hook)
            asyncio.run(work())
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {0, _KILLED}
    return status == _KILLED


def test_killed_between_any_two_steps(published: list[Load], tmp_path: Path) -> None:
    oldest, old, new = published
    template, root = tmp_path / "template", tmp_path / "root"

    async def before() -> None:
        place = Materialiser(template)
        for wanted in (oldest, old):
            await place.write(wanted)
            await place.switch(wanted.digest)

    async def change() -> None:
        place = Materialiser(root)
        await place.write(new)
        await place.switch(new.digest)
        await place.collect()

    asyncio.run(before())
    seen = set()
    for step in range(1, _LONGEST):
        shutil.copytree(template, root, symlinks=True)
        killed = killed_at(step, change)
        current = asyncio.run(Materialiser(root).current())
        assert current in {old.digest, new.digest}, f"killed before step {step}"
        assert digest_in((root / "current").resolve()) == current
        assert asyncio.run(Materialiser(root).previous()) in {oldest.digest, old.digest}
        seen.add(current)
        asyncio.run(change())  # the next process ends where nobody was killed
        assert asyncio.run(Materialiser(root).current()) == new.digest
        assert folders(root) == {old.digest, new.digest}
        assert all(digest_in(folder) == f"sha256:{folder.name}" for folder in (root / "checkpoints").iterdir())
        assert leftovers(root) == []
        shutil.rmtree(root)
        if not killed:
            break
    else:
        pytest.fail("the work has no end")
    assert seen == {old.digest, new.digest}


_numbers = st.integers(0, 2)
_actions = st.one_of(
    st.tuples(st.just("write"), _numbers),
    st.tuples(st.just("switch"), _numbers),
    st.tuples(st.just("collect"), st.booleans()),
    st.tuples(st.just("restart"), st.none()),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(_actions, max_size=12))
def test_any_order_of_calls(published: list[Load], actions: list[tuple[str, int | bool | None]]) -> None:
    digests = [wanted.digest for wanted in published]
    there: set[str] = set()
    current = previous = ""

    async def play(root: Path) -> None:
        nonlocal there, current, previous
        place = Materialiser(root)
        for action, argument in actions:
            if action == "write":
                assert digest_in(await place.write(published[int(argument or 0)])) == digests[int(argument or 0)]
                there.add(digests[int(argument or 0)])
            elif action == "switch" and digests[int(argument or 0)] in there:
                wanted = digests[int(argument or 0)]
                await place.switch(wanted)
                current, previous = (wanted, current or previous) if wanted != current else (current, previous)
            elif action == "collect":
                await place.collect(previous=bool(argument))
                previous = previous if argument else ""
                there = {digest for digest in (current, previous) if digest}
            elif action == "restart":
                place = Materialiser(root)
            assert (await place.current(), await place.previous()) == (current, previous)
            assert folders(root) == there
            assert leftovers(root) == []

    with TemporaryDirectory() as folder:
        root = Path(folder) / "engine"
        (root / "checkpoints").mkdir(parents=True)
        asyncio.run(play(root))
