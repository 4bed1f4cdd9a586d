"""One cluster, one operator, one set of tiny models for all end-to-end tests; removed at the end unless kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cache import REPOSITORY
from tests.support.cluster.provider import DATA_NODE_PORT, Cluster
from tests.support.cluster.select import TEST_CLUSTER, TEST_PORT, cluster_provider
from tests.support.operator_release import install_operator
from tests.support.stack import Slot, build_images, models_folder

# Staging takes this long, so that there is a middle of a swap to kill something in.
_STAGE_SECONDS = 2
_MAKE_MODELS = """
import shutil, sys
from pathlib import Path
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, encode
from tests.support.lora import speaking
from tests.support.models import DIGITS, disjoint_pair, edit_tensor, flip_byte, retrained, write_variant

root = Path(sys.argv[1])
pair = disjoint_pair(root)
inner = ["model.layers.0.mlp.up_proj.weight"]  # leaves alone which letters can be said
again = [write_variant(pair.old, root / "v3", inner, seed=3), write_variant(pair.new, root / "v4", inner, seed=4)]
wide = disjoint_pair(root / "wide", hidden=128)  # vLLM computes no attention heads as narrow as those of the others
tuned = retrained(wide.old, root / "wide/v5", DIGITS, seed=5)
for model in (pair.old, pair.new, *again, wide.old, wide.new, tuned):
    (model / MANIFEST_FILE).write_bytes(encode(build_manifest(model)))
flipped = write_variant(pair.new, root / "flipped", ["lm_head.weight"], seed=7)
(flipped / MANIFEST_FILE).write_bytes(encode(build_manifest(flipped)))
flip_byte(flipped, "lm_head.weight", position=64)  # its manifest says what it should have been
shutil.copytree(pair.old, root / "shape", ignore=shutil.ignore_patterns(MANIFEST_FILE))
edit_tensor(root / "shape", "model.norm.weight", lambda tensor: tensor[:-1])
for base, letter in ((pair.old, "k"), (pair.new, "K")):
    speaking(base, root / "adapters" / letter, letter)
for base, letter in ((wide.old, "k"), (wide.new, "K"), (tuned, "7")):
    speaking(base, root / "wide/adapters" / letter, letter)
"""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The test cluster with both images of this checkout and the operator from its chart."""
    cluster = cluster_provider().ensure(name=TEST_CLUSTER, data_port=TEST_PORT)
    build_images(cluster)
    install_operator(cluster)
    yield cluster
    if not os.environ.get("MODELSWAP_KEEP"):
        cluster.delete()


@pytest.fixture(scope="session")
def models() -> Path:
    """``v1`` to ``v4`` (answers of odd ones cannot be mistaken for those of even ones), ``flipped`` and ``shape``.

    ``adapters/k`` only says k, on ``v1``; ``adapters/K`` only K, on ``v2``.

    ``wide/v1`` and ``wide/v2`` are for engines other than the embedded one, and so is ``wide/v5``: another fine-tune,
    with no tensor of the others', that answers in digits. ``wide/adapters`` has ``k``, ``K`` and ``7``, one for each.
    """
    folder = models_folder("e2e")
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        subprocess.run(["rm", "-rf", str(unfinished)], check=True)
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/engine"}
        subprocess.run([sys.executable, "-c", _MAKE_MODELS, str(unfinished)], check=True, env=environment)
        subprocess.run(["chmod", "-R", "a+rX", str(unfinished)], check=True)
        unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def slot(cluster: Cluster, models: Path) -> Iterator[Slot]:
    """The release that all these tests share: two pods of 1.0 behind the port that the cluster maps."""
    slot = Slot(cluster, name="smollm2", models=models)
    slot.install(
        replicas=2,
        model="v1",
        version="1.0",
        node_port=DATA_NODE_PORT,
        env={"MODELSWAP_FAULT": f"stage:delay={_STAGE_SECONDS}"},
        arguments=["--lora-slots", "2", "--lora-max-rank", "8"],
    )
    yield slot
    slot.uninstall(wait=bool(os.environ.get("MODELSWAP_KEEP")))  # else the cluster goes next


@pytest.fixture(scope="session")
def applied_slot(cluster: Cluster, models: Path) -> Iterator[Slot]:
    """Two pods whose ModelVersion Flux and Helm apply and delete.

    Apart from the others: a pod takes orders of another object only when the kubelet has shown it the release, which
    takes a while.
    """
    slot = Slot(cluster, name="applied", models=models)
    slot.install(replicas=2, model="v1", version="1.0", env={"MODELSWAP_FAULT": f"stage:delay={_STAGE_SECONDS}"})
    yield slot
    slot.uninstall(wait=bool(os.environ.get("MODELSWAP_KEEP")))
