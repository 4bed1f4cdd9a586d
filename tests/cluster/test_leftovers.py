"""What is started for a cluster goes with it: containers, networks, and the whole of a Docker engine begun by hand."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.cache import HACK
from tests.support.cluster.kind import KindProvider
from tests.support.cluster.provider import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]

# In a network and a mount namespace of its own, so that neither the machine's engine nor its rules are in the way.
_ENGINE = r"""
set -eu
ip link set lo up
facts() {
  iptables-save | grep -E '^(-|:.* DROP)' || true
  ip -o link | sed 's/@.*//' | awk '{print $2}'
  awk '{print $2}' /proc/mounts | sort
  cat /proc/sys/net/ipv4/ip_forward
}
facts > "$1/before"
"$2/kind/dockerd.sh" start
export DOCKER_HOST=$("$2/kind/dockerd.sh" host)
mkdir "$1/root"
cp /bin/busybox "$1/root/"
tar -C "$1/root" -c . | docker import - leftovers:1
docker network create leftovers
docker run --detach --publish 127.0.0.1:9999:80 --network leftovers --name leftovers leftovers:1 /busybox sleep 300
facts > "$1/during"
"$2/kind/dockerd.sh" stop
facts > "$1/after"
"""


def _docker(*arguments: str) -> str:
    host = subprocess.run([HACK / "kind/dockerd.sh", "host"], text=True, capture_output=True, check=True).stdout.strip()
    environment = {**os.environ, "DOCKER_HOST": host}
    return subprocess.run(
        ["docker", *arguments], env=environment, text=True, capture_output=True, check=True
    ).stdout.strip()


def test_a_removed_cluster_leaves_no_containers_and_no_volumes(bare_cluster: Cluster) -> None:
    def everything() -> tuple[set[str], set[str]]:
        return set(_docker("ps", "--all", "--quiet").split()), set(_docker("volume", "ls", "--quiet").split())

    before = everything()
    provider = KindProvider()
    cluster = provider.ensure(name="modelswap-leftovers", nodes=2, data_port=18082)
    assert len(cluster.kubectl("get", "nodes", "--output=name").split()) == 2
    assert everything() != before
    cluster.delete()
    assert everything() == before
    assert "modelswap-leftovers" not in provider.names()
    assert not cluster.kubeconfig.exists()


def test_an_engine_begun_by_hand_ends_without_a_trace(tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere.sock"}
    with tempfile.TemporaryDirectory(prefix="m") as short:  # sockets lie in it, whose paths are limited
        environment["MODELSWAP_CACHE"] = short
        command = ["unshare", "--net", "--mount", "bash", "-c", _ENGINE, "bash", str(tmp_path), str(HACK)]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    assert "docker0" in (tmp_path / "during").read_text()


def test_a_cache_path_too_long_for_sockets_is_refused_with_the_remedy(tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere.sock"}
    environment["MODELSWAP_CACHE"] = str(tmp_path / ("x" * 60))
    command = ["unshare", "--net", "--mount", str(HACK / "kind/dockerd.sh"), "start"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert "too long for a socket: set MODELSWAP_CACHE to a shorter folder" in done.stderr
