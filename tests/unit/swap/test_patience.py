"""Who gives up first: the backend, which knows what it asked, never the one who waits for it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.port import Bounds
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.patience import Patience
from modelswap_engine.swap.settings import SwapSettings
from tests.support.fake_backend import Fault
from tests.support.swapping import World, checkpoint, request

SECONDS = st.floats(0, 1e6)
KINDS = ("call", "stage", "load", "hash")


@given(
    call=SECONDS,
    stage=SECONDS,
    load=SECONDS,
    whole=SECONDS,
    own=st.fixed_dictionaries(dict.fromkeys(KINDS, SECONDS)),
)
def test_whatever_is_set_the_backend_is_outlasted(
    call: float, stage: float, load: float, whole: float, own: dict[str, float]
) -> None:
    external = ExternalSettings(call=call, stage=stage, load=load, hash=whole)
    settings = SwapSettings(state_dir=Path(), **{f"{kind}_seconds": seconds for kind, seconds in own.items()})
    for bounds in (external.bounds, external.plain_bounds):
        patience = Patience.over(bounds, settings)
        for kind in KINDS:
            assert getattr(patience, kind) >= own[kind]
            assert getattr(patience, kind) > getattr(bounds, kind)
        assert bounds.call > call
        assert (bounds.stage > stage, bounds.load > load, bounds.hash > whole) == (True, True, True)
    assert external.plain_bounds.call > load, "the engine itself loads, in the middle of the swap"


def test_the_defaults_of_every_engine_are_outlasted() -> None:
    backend, defaults = EmbeddedBackend(EmbeddedSettings()), ExternalSettings()
    for bounds in (backend.bounds(), defaults.bounds, defaults.plain_bounds):
        patience = Patience.over(bounds, SwapSettings(state_dir=Path()))
        assert all(getattr(patience, kind) > getattr(bounds, kind) for kind in KINDS)


@pytest.fixture
async def world(tmp_path: Path):
    made = World(tmp_path)
    made.backend.longest = Bounds(call=500)
    made.build()
    await made.start()
    yield made
    await made.stop()


async def test_a_slow_commit_is_waited_for_as_long_as_the_backend_gives_it(world: World) -> None:
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.backend.faults["commit"] = Fault.HANG
    await world.coordinator.swap(request(target))
    await world.clock.advance(499)
    assert world.coordinator.operation("op-1").state is SwapState.COMMITTING
    await world.clock.advance(60)
    assert (await world.ended("op-1")).state is SwapState.ROLLED_BACK
