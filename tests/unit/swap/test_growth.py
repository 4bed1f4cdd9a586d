"""When a cold restart is advised: only for what shows again and again, and never for what is accounted for."""

from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.swap.growth import MIB, Growth, GrowthLimits, observe
from tests.support.swapping import World, checkpoint

LIMITS = GrowthLimits(warm_swaps=2, samples=3)
GIB = 1024 * MIB


def memory(*, beside=500 * MIB, previous=0, used=0, reserved=0):
    return MemoryState(
        model_bytes=2 * GIB,
        previous_bytes=previous,
        kv_cache_bytes=GIB,
        rss_bytes=3 * GIB + previous + beside,
        allocator_used_bytes=used,
        allocator_reserved_bytes=reserved,
    )


def after(*samples, limits=LIMITS, swaps=5):
    growth = Growth()
    for sample in samples:
        growth = observe(growth, sample, swaps=swaps, limits=limits)
    return growth.advice


def test_growth_that_nothing_explains_is_advised_against_once_it_is_certain():
    grown = memory(beside=800 * MIB)
    assert after(memory(), grown, grown) == ""
    advice = after(memory(), grown, grown, grown)
    assert "300 MiB" in advice
    assert after(memory(), grown, grown, memory(), grown) == ""
    assert after(memory(), grown, grown, grown, memory()) == ""


def test_a_retained_version_is_no_growth():
    assert after(memory(), *[memory(previous=GIB)] * 5) == ""


def test_growth_before_the_engine_is_warm_is_no_growth():
    growth = Growth()
    for swaps, beside in ((0, 100), (1, 600), (2, 900), (3, 900), (4, 900), (5, 900)):
        growth = observe(growth, memory(beside=beside * MIB), swaps=swaps, limits=LIMITS)
    assert growth.advice == ""


def test_holes_of_the_allocator():
    holes = memory(used=2 * GIB, reserved=3 * GIB)
    assert "1024 of the allocator's 3072 MiB" in after(memory(), holes, holes, holes)
    assert after(memory(), *[memory(used=2 * GIB, reserved=2 * GIB + 200 * MIB)] * 4) == ""


def test_a_number_of_swaps_if_one_is_set():
    limits = GrowthLimits(warm_swaps=2, samples=1, swaps=100)
    assert after(memory(), memory(), limits=limits, swaps=99) == ""
    assert "100 swaps" in after(memory(), memory(), limits=limits, swaps=100)
    assert after(memory(), memory(), swaps=10**6) == ""


@given(st.lists(st.integers(0, 255), min_size=1))
def test_no_wobble_below_the_bound_is_ever_advised_against(wobble):
    assert after(*[memory(beside=(500 + extra) * MIB) for extra in wobble]) == ""


async def test_the_state_says_it_and_a_whole_load_ends_it(tmp_path):
    limits = GrowthLimits(warm_swaps=1, samples=1, swaps=3)
    world = World(tmp_path, growth=limits)
    await world.start()
    versions = [world.template, world.publish("1.1", checkpoint(q=b"QQQQ"))]
    for number in range(4):
        assert world.state.restart_advice == ""
        await world.swap(versions[(number + 1) % 2], f"op-{number}", revision=number + 1)
    assert "3 swaps" in world.state.restart_advice
    world.assert_serves(world.template)  # nothing restarts by itself
    world.backend.kill()
    await world.clock.advance(5)
    assert world.state.restart_advice == ""
    await world.stop()
