"""``modelswap.publish`` as training code calls it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelswap.publish import publish
from modelswap.rollout import Bumped, NotServed, Served, verdict
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Provenance
from modelswap_engine.protocol.errors import BadRequest, InvalidCheckpoint, SourceUnreadable
from tests.support.checkpoints import CONFIG, write_checkpoint

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
SIDES = {"config.json": json.dumps(CONFIG).encode()}


def test_tensors_and_a_label(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    done = publish(
        WEIGHTS,
        f"file://{tmp_path}/chat/",
        version="step-7",
        side_files=SIDES,
        provenance={"who": "trainer", "job": "42"},
        progress=lambda *figures: told.append(figures),
    )
    folder = tmp_path / "chat" / "step-7"
    assert done.uri == f"file://{folder}"
    assert done.digest == build_manifest(folder).digest
    assert told[-1] == (done.bytes_sent, done.bytes_sent)
    assert {name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()} == {
        name: tensor.tolist() for name, tensor in WEIGHTS.items()
    }
    shown = manifests.decode((folder / MANIFEST_FILE).read_bytes())
    assert shown.provenance == Provenance(who="trainer", job="42")
    assert publish(WEIGHTS, done.uri, side_files=folder).already_there


async def test_where_a_loop_runs_already(tmp_path: Path) -> None:
    done = publish(str(write_checkpoint(tmp_path / "a")), f"file://{tmp_path}/1", side_files={"vocab.json": b"{}"})
    assert done.digest == build_manifest(tmp_path / "1").digest != build_manifest(tmp_path / "a").digest


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no config\.json"):
        publish(WEIGHTS, f"file://{tmp_path}/1")
    with pytest.raises(SourceUnreadable, match="No such file"):
        publish(WEIGHTS, f"file://{tmp_path}/1", side_files=tmp_path / "nowhere")
    with pytest.raises(BadRequest, match="'why'"):
        publish(WEIGHTS, f"file://{tmp_path}/1", side_files=SIDES, provenance={"why": "not"})
    with pytest.raises(InvalidCheckpoint):
        publish(WEIGHTS, f"file://{tmp_path}/1", side_files=SIDES, provenance={"who": "a\x1b[2J"})
    assert list(tmp_path.iterdir()) == []


BUMPED = Bumped(model_version="chat", namespace="llm", uid="1", generation=7, version="1.1")


def thing(*conditions: tuple[str, str, str], generation: int = 7, observed: int = 7, uid: str = "1") -> dict[str, Any]:
    return {
        "metadata": {"uid": uid, "generation": generation},
        "spec": {"version": "1.2"},
        "status": {
            "conditions": [
                {"type": kind, "status": status, "reason": reason, "message": "words", "observedGeneration": observed}
                for kind, status, reason in conditions
            ],
            "target": {"digest": "sha256:1"},
            "podCounts": {"ready": 3},
        },
    }


def test_what_is_served_and_what_is_not_yet() -> None:
    ready = verdict(thing(("Ready", "True", "Succeeded")), BUMPED)
    assert ready == Served(digest="sha256:1", pods=3, reason="Succeeded", message="words", seconds=0.0)
    assert verdict(thing(("Ready", "True", "Succeeded"), observed=6), BUMPED) == "the operator has not looked at it yet"
    assert verdict(thing(("Ready", "Unknown", "Progressing")), BUMPED) == "Progressing: words"
    assert verdict({"metadata": {"uid": "1", "generation": 7}, "spec": {}}, BUMPED) == (
        "the operator has not looked at it yet"
    )
    assert verdict(thing(("Stalled", "True", "Refused"), ("Ready", "False", "Refused"), observed=6), BUMPED)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "Deleted"),
        (thing(uid="2"), "Deleted"),
        (thing(generation=8), "Superseded"),
        (thing(("Ready", "False", "DigestMismatch"), ("Stalled", "True", "Failed")), "DigestMismatch"),
        (
            thing(("Ready", "Unknown", "Progressing"), ("Stalled", "True", "ProgressDeadlineExceeded")),
            "ProgressDeadlineExceeded",
        ),
    ],
)
def test_what_never_will_be(found: dict[str, Any] | None, reason: str) -> None:
    with pytest.raises(NotServed) as caught:
        verdict(found, BUMPED)
    assert caught.value.reason == reason
