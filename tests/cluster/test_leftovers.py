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
# How it ends: stopped, or killed and then stopped, with another start in between where the word says so.
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
docker inspect --format '{{.State.Pid}}' leftovers > "$1/sleep"
facts > "$1/during"
engine=$MODELSWAP_CACHE/kind/docker
case $3 in killed*)
  daemon=$(cat "$engine/dockerd.pid") containerd=$(cat "$engine/exec/containerd/containerd.pid")
  kill -KILL "$daemon"
  while kill -0 "$daemon" 2>/dev/null && ! grep -q '^State:.Z' "/proc/$daemon/status"; do sleep .1; done
  ! "$2/kind/dockerd.sh" host
  # The numbers of what was killed may be those of other processes by now.
  if [ "$3" = killed-reused ]; then
    kill -KILL "$containerd"
    echo $$ > "$engine/dockerd.pid"
    echo $$ > "$engine/exec/containerd/containerd.pid"
  fi
esac
case $3 in *reused | *restarted)
  "$2/kind/dockerd.sh" start
  ! kill -0 "$(cat "$1/sleep")" 2>/dev/null
  docker rm --force leftovers
  docker run --rm leftovers:1 /busybox true
esac
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


def test_a_cluster_that_was_stopped_is_not_revived(bare_cluster: Cluster) -> None:
    provider = KindProvider()
    first = provider.ensure(name="modelswap-leftovers", data_port=18082)
    try:
        first.kubectl("create", "namespace", "left-by-a-killed-run")
        _docker("restart", "--time=0", "modelswap-leftovers-control-plane")
        second = provider.ensure(name="modelswap-leftovers", data_port=18082)
        assert "left-by-a-killed-run" not in second.kubectl("get", "namespaces")
    finally:
        first.delete()


@pytest.mark.parametrize("end", ["stopped", "killed", "killed-restarted", "killed-reused"])
def test_an_engine_begun_by_hand_ends_without_a_trace(tmp_path: Path, end: str) -> None:
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere.sock"}
    with tempfile.TemporaryDirectory(prefix="m") as short:  # sockets lie in it, whose paths are limited
        environment["MODELSWAP_CACHE"] = short
        command = ["unshare", "--net", "--mount", "bash", "-c", _ENGINE, "bash", str(tmp_path), str(HACK), end]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    assert "docker0" in (tmp_path / "during").read_text()
    assert not Path("/proc", (tmp_path / "sleep").read_text().strip(), "exe").exists()


def test_a_cache_path_too_long_for_sockets_is_refused_with_the_remedy(tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere.sock"}
    environment["MODELSWAP_CACHE"] = str(tmp_path / ("x" * 60))
    command = ["unshare", "--net", "--mount", str(HACK / "kind/dockerd.sh"), "start"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert "too long for a socket: set MODELSWAP_CACHE to a shorter folder" in done.stderr
