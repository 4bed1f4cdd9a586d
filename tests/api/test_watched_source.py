"""A source that is overwritten under pods that serve, on a real API server: it is said, and nothing else happens."""

from __future__ import annotations

import pytest

from tests.support.fake_pods import Slot, digest, eventually, ref
from tests.support.fake_sidecar import Content

pytestmark = pytest.mark.api

V10 = ref("1.0", "a")


async def test_a_source_that_moved_is_said_until_it_is_back(slot: Slot) -> None:
    for _ in range(2):
        (await slot.add_pod(V10)).sidecar.protocol = 3
    slot.create(V10)
    await slot.ready_at(V10)
    before = slot.contents[V10.uri]
    slot.contents[V10.uri] = Content(digest("9"))
    slot.mark(annotations={"modelswap.dev/requestedAt": "overwritten"})
    drifted = ("True", "SourceDrifted")
    await eventually(lambda: slot.condition("SourceDrifted") == drifted, what=slot.story)
    assert slot.condition("Ready") == ("True", "Succeeded")
    assert slot.condition("Stalled") is None
    notes = await eventually(lambda: [note for reason, note in slot.events() if reason == "SourceDrifted"])
    assert notes[0].startswith(f"{V10.uri} holds {digest('9')} now")
    assert sorted(pod.sidecar.calls.count("POST /look") for pod in slot.pods) == [0, 1]
    assert not any(pod.sidecar.swaps for pod in slot.pods)
    slot.contents[V10.uri] = before
    slot.mark(annotations={"modelswap.dev/requestedAt": "put back"})
    await eventually(lambda: slot.condition("SourceDrifted") is None, what=slot.story)
    assert sorted(pod.sidecar.calls.count("POST /look") for pod in slot.pods) == [1, 1]


async def test_an_adapter_s_source_that_moved_is_said_until_it_is_back(slot: Slot) -> None:
    uri = "file:///adapters/1"
    slot.adapter_contents[uri] = digest("1")
    for _ in range(2):
        (await slot.add_pod(V10)).sidecar.protocol = 3
    slot.create(V10)
    await slot.ready_at(V10)
    slot.create_adapter("support", {"uri": uri})
    await eventually(lambda: slot.adapters_say().get("support") == ("True", "Succeeded"), what=slot.story)
    slot.adapter_contents[uri] = digest("9")
    slot.mark_adapter("support", annotations={"modelswap.dev/requestedAt": "overwritten"})

    def drifted() -> list[str]:
        found = slot.adapter("support")["status"]["conditions"]
        return [c["message"] for c in found if (c["type"], c["status"]) == ("SourceDrifted", "True")]

    (message,) = await eventually(drifted, what=slot.story)
    assert message.startswith(f"{uri} holds {digest('9')} now and not {digest('1')} any more")
    assert slot.adapters_say()["support"] == ("True", "Succeeded")
    assert slot.loaded() == [{"support": "1"}] * 2
    assert sum(pod.sidecar.calls.count("POST /adapters/look") for pod in slot.pods) == 1
    slot.adapter_contents[uri] = digest("1")
    slot.mark_adapter("support", annotations={"modelswap.dev/requestedAt": "put back"})
    await eventually(lambda: not drifted(), what=slot.story)
