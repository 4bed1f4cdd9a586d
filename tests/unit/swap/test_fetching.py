"""Versions whose bytes travel: what is fetched and when, and what becomes of a swap that cannot have them."""

import pytest

from modelswap_engine.protocol.errors import InsufficientDisk, SourceDenied, SourceUnreadable
from modelswap_engine.protocol.states import SwapState
from tests.support.swapping import checkpoint


async def test_only_what_changed_is_fetched_before_it_is_staged(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.elsewhere.add(target.uri)
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    assert world.sources.obtained == [["k", "q"]], "what is fused is read together"
    assert status.bytes_fetched == 8


async def test_what_is_here_already_costs_nothing(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.elsewhere.add(target.uri)
    resolve = world.sources.resolve

    async def stored(uri, **asked):
        resolved = await resolve(uri, **asked)

        async def obtain(names, *, travelled=None):
            return 0

        resolved.obtain = obtain
        return resolved

    world.sources.resolve = stored
    assert (await world.swap(target)).bytes_fetched == 0


@pytest.mark.parametrize(
    "error", [SourceUnreadable("it broke off"), SourceDenied("expired"), InsufficientDisk("full")], ids=lambda e: e.code
)
async def test_what_cannot_be_fetched_touches_nothing(world, error):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.elsewhere.add(target.uri)
    world.sources.unfetchable[target.uri] = error
    status = await world.swap(target)
    assert status.state is SwapState.ABORTED
    assert (status.error.code, status.error.retryable) == (error.code, True)
    assert not {"stage", "pause"} & set(world.backend.steps)
    world.assert_serves(world.template)
    world.sources.unfetchable.clear()
    assert (await world.swap(target, "op-2", revision=2)).state is SwapState.SERVING


async def test_versions_in_use_are_told_to_the_sources(world):
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    status = await world.swap(target)
    assert status.state is SwapState.SERVING
    assert world.sources.retained == {target.digest, world.template.digest}
