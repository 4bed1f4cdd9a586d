"""The bench of many pods, with few: it converges, and what it counts is what there was."""

from __future__ import annotations

import pytest

from bench.scale.run import Size, measure_scale

pytestmark = pytest.mark.api


async def test_few_pods_converge_and_a_slot_at_rest_writes_nothing() -> None:
    said: list[str] = []
    size = Size(slots=2, pods=3, idle_slots=4, changes=2, rest_seconds=2.0)
    found = await measure_scale(size, report=said.append)
    assert found.converged, said
    assert (found.slots, found.pods, found.idle_slots, found.changes) == (2, 6, 4, 2)
    assert found.rest_writes == 0
    assert found.tokens == 6, "a token is used as long as it is good"
    assert found.staged_ahead == 6, "the default flow is what is measured"
    assert found.requests_per_pod > 1
    assert 0 < found.first_call_p50 <= found.first_call_p99
    assert found.line().startswith("scale: 6 pods in 2 slots converged in ")
