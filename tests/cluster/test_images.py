"""The images hold all they need and run as the charts run them: no rights, no network, nothing to write to but /tmp."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.cache import HACK, run_script
from tests.support.cluster.config import SITE_IN_NODE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

_SANDBOX = [
    "--rm",
    "--read-only",
    "--tmpfs=/tmp",
    "--cap-drop=ALL",
    "--network=none",
    "--security-opt=no-new-privileges",
]


@pytest.fixture(scope="module")
def docker_host() -> str:
    """The Docker engine that builds, started if none answers."""
    run_script("kind/dockerd.sh", "start")
    return _printed("kind/dockerd.sh", "host")


def _printed(script: str, argument: str) -> str:
    return subprocess.run([HACK / script, argument], text=True, capture_output=True, check=True).stdout.strip()


def _docker(host: str, *arguments: str) -> str:
    environment = {**os.environ, "DOCKER_HOST": host}
    done = subprocess.run(["docker", *arguments], env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _assert_without_rights(host: str, image: str) -> None:
    config = json.loads(_docker(host, "image", "inspect", image))[0]["Config"]
    assert config["User"] == "65532:65532"
    owned = f"find {SITE_IN_NODE.rsplit('/', 1)[0]} -writable -print -quit"
    assert _docker(host, "run", *_SANDBOX, "--entrypoint=sh", image, "-c", owned) == ""


def test_the_operator_image_imports_all_of_the_operator(docker_host: str) -> None:
    run_script("images/build.sh", "operator")
    image = "modelswap/operator:dev"
    _assert_without_rights(docker_host, image)
    code = "import modelswap_operator.runtime.main, kopf; print(kopf.__name__)"
    assert _docker(docker_host, "run", *_SANDBOX, "--entrypoint=python3", image, "-c", code).strip() == "kopf"


def test_the_engine_image_runs_on_mounted_packages(docker_host: str) -> None:
    run_script("images/site.sh")
    run_script("images/build.sh", "engine")
    image = "modelswap/engine:dev"
    _assert_without_rights(docker_host, image)
    site = f"--volume={Path(_printed('images/site.sh', 'path'))}:{SITE_IN_NODE}:ro"
    assert "serve" in _docker(docker_host, "run", *_SANDBOX, site, image, "--help")


def test_the_sidecar_image_needs_no_mount_and_has_no_torch(docker_host: str) -> None:
    run_script("images/build.sh", "sidecar")
    image = "modelswap/sidecar:dev"
    _assert_without_rights(docker_host, image)
    code = "import importlib.util, modelswap_engine.cli.proxy; print(importlib.util.find_spec('torch'))"
    assert _docker(docker_host, "run", *_SANDBOX, "--entrypoint=python3", image, "-c", code).strip() == "None"


@pytest.mark.full
def test_the_complete_engine_image_needs_no_mount(docker_host: str) -> None:
    run_script("images/build.sh", "engine-full")
    image = "modelswap/engine-full:dev"
    _assert_without_rights(docker_host, image)
    code = "import torch, transformers, modelswap_engine.cli.serve; print(torch.zeros(2).sum().item())"
    assert _docker(docker_host, "run", *_SANDBOX, "--entrypoint=python3", image, "-c", code).strip() == "0.0"
