"""The engine that swaps are made in, over a backend in memory; files of this folder that need another one say so."""

import pytest

from tests.support.swapping import World, checkpoint


@pytest.fixture
async def world(tmp_path):
    world = World(tmp_path)
    await world.start()
    yield world
    await world.stop()
    assert world.backend.violations == []


@pytest.fixture
def target(world):
    return world.publish("1.1", checkpoint(q=b"QQQQ"))
