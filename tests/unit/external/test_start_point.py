"""What the launcher is told to start on: only what was written and proved, and nothing in between."""

import os
from pathlib import Path

import pytest

from modelswap_engine.backends.external import handshake
from modelswap_engine.backends.external.handshake import Launch
from modelswap_engine.backends.external.materialise import Materialiser
from modelswap_engine.backends.external.start_point import StartPoint
from modelswap_engine.protocol.errors import ManifestMismatch, Unavailable
from tests.support.whole_folders import digest_in, folders, order, publish


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


async def test_what_is_announced_is_at_the_stable_path(models: Path, runtime: Path, tmp_path: Path) -> None:
    place = Materialiser(tmp_path / "engine")
    start = StartPoint(place, runtime=runtime)
    for number in (1, 2):
        wanted = await order(publish(models, number), tmp_path)
        folder = await start.offer(wanted)
        assert handshake.read_launch(runtime) == Launch(model=str(place.path), digest=wanted.digest)
        assert digest_in(place.path.resolve()) == wanted.digest == digest_in(folder)


async def test_what_nobody_starts_on_any_more_is_removed(models: Path, runtime: Path, tmp_path: Path) -> None:
    start = StartPoint(Materialiser(tmp_path / "engine"), runtime=runtime)
    digests = []
    for number in range(4):
        wanted = await order(publish(models, number), tmp_path)
        await start.offer(wanted)
        digests.append(wanted.digest)
    assert folders(tmp_path / "engine") == set(digests[-2:])


async def test_an_engine_waits_while_nothing_right_can_be_written(models: Path, runtime: Path, tmp_path: Path) -> None:
    start = StartPoint(Materialiser(tmp_path / "engine"), runtime=runtime)
    await start.offer(await order(publish(models, 1), tmp_path))
    source = publish(models, 2)
    wanted = await order(source, tmp_path)
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(ManifestMismatch):
        await start.offer(wanted)
    assert handshake.read_launch(runtime) is None


async def test_withdrawn_is_withdrawn(models: Path, runtime: Path, tmp_path: Path) -> None:
    start = StartPoint(Materialiser(tmp_path / "engine"), runtime=runtime)
    wanted = await order(publish(models, 1), tmp_path)
    await start.offer(wanted)
    await start.withdraw()
    await start.withdraw()
    assert handshake.read_launch(runtime) is None
    await start.offer(wanted)
    assert handshake.read_launch(runtime) is not None


async def test_a_volume_that_is_not_there_is_no_refusal_of_the_version(models: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    start = StartPoint(Materialiser(tmp_path / "engine"), runtime=tmp_path / "file")
    with pytest.raises(Unavailable, match="Not a directory"):
        await start.offer(await order(publish(models, 1), tmp_path))
