"""A ModelVersion that must be signed, on a real API server: who is refused, what serves on, what the history says."""

from __future__ import annotations

import pytest

from tests.support.fake_pods import Slot, digest, eventually, ref
from tests.support.fake_sidecar import Content

pytestmark = pytest.mark.api

V10, V11 = ref("1.0", "a"), ref("1.1", "b")


async def test_an_unsigned_version_is_refused_until_it_is_signed(slot: Slot) -> None:
    for _ in range(2):
        (await slot.add_pod(V10)).sidecar.protocol = 3
    slot.create(V10, verification={"required": True, "keys": ["release.pub"]})
    slot.contents[V10.uri] = Content(digest("a"), signed_by="key release.pub")
    await slot.ready_at(V10)
    slot.bump(V11)
    await slot.stalled("SignatureMissing")
    assert slot.condition("Serving") == ("True", "PodsServe")
    assert "1.1 has no signature beside its manifest; sign it" in slot.message()
    assert [len(pod.sidecar.swaps) for pod in slot.pods] == [0, 0]
    assert slot.serving() == ["1.0", "1.0"]
    slot.contents[V11.uri] = Content(
        digest("b"), signed_by="key release.pub", provenance={"who": "ci@example.org", "job": "train-41"}
    )
    slot.mark(annotations={"modelswap.dev/requestedAt": "signed now"})
    await slot.ready_at(V11)
    verification = slot.pods[0].sidecar.swaps[0].target.verification
    assert verification is not None
    assert (verification.required, verification.keys) == (True, ("release.pub",))
    found = slot.assignment()
    assert found is not None
    assert found.stable is not None
    assert found.stable.verification == verification
    await eventually(lambda: slot.object()["status"]["history"][0]["version"] == "1.1", what=slot.story)
    entry = slot.object()["status"]["history"][0]
    assert entry["provenance"] == {"who": "ci@example.org", "job": "train-41"}
    assert entry["signedBy"] == "key release.pub"
