"""The flow that a newcomer sees first, with tiny models: it must end well, and it must notice when it does not."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from demo.answers import mixed_by_text
from demo.checkpoints import write_manifest
from demo.engine import CommandFailed
from demo.model import DemoModels, manifest_of
from demo.quickstart import Quickstart, Settings
from modelswap_engine.checkpoint.diff import diff

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    from tests.support import models

    root = tmp_path_factory.mktemp("models")
    pair = models.disjoint_pair(root)
    corrupt = models.write_variant(pair.new, root / "corrupt", pair.changed, seed=7)
    misshapen = models.write_variant(pair.new, root / "shape", (), seed=8)
    models.edit_tensor(misshapen, "model.norm.weight", lambda tensor: tensor[:-1])
    for folder in (pair.old, pair.new, corrupt, misshapen):
        write_manifest(folder)
    models.flip_byte(corrupt, pair.changed[0])
    return Settings(
        models=DemoModels(pair.old, pair.new, corrupt, misshapen),
        home=root / "home",
        name="tiny",
        questions=("hello",),
        streams=2,
        max_tokens=8,
        served_between=2,
        mixed=mixed_by_text(models.LOWER, models.UPPER),
        options=("--kv-blocks=64", "--page-size=16"),
    )


async def test_the_whole_flow_ends_well(settings: Settings, capfd: pytest.CaptureFixture[str]) -> None:
    record = await Quickstart(settings).run()
    shown = capfd.readouterr().out
    assert record.complaints == []
    assert record.summary is not None
    assert record.summary.clean
    assert {"1.0", "1.1"} <= record.summary.by_version.keys()
    assert record.answers["1.0"] != record.answers["1.1"]
    assert record.swap is not None
    assert record.swap.plan is not None
    old, new = (manifest_of(folder) for folder in (settings.models.base, settings.models.tuned))
    assert record.swap.plan.changed_tensors == len(diff(old, new).changed)
    assert "ManifestMismatch" in shown
    assert "IncompatibleModel" in shown
    assert "$ modelswap swap --source" in shown


@pytest.mark.full
async def test_a_bad_version_that_is_accepted_ends_the_flow(settings: Settings, tmp_path: Path) -> None:
    models = settings.models
    fine = shutil.copytree(models.tuned, models.base.parent / "fine")
    wrong = dataclasses.replace(settings, models=dataclasses.replace(models, corrupt=fine), home=tmp_path)
    with pytest.raises(CommandFailed, match="ended with status 0, not 1"):
        await Quickstart(wrong).run()
