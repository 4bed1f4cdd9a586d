"""Clusters in containers, by kind: started once, found again cheaply, removed without a trace.

The programs, the Docker engine (where none answers) and the node image (where none can be pulled) come from
`hack/kind`. Refuses to know what is installed into a cluster.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cache import HACK, cache_root, kind_cache, run_script
from tests.support.cluster.config import KindConfig
from tests.support.cluster.provider import Clients, ClusterError, Programs

_READY_SECONDS = 180
_ENGINE = ".engine"  # no cluster can be called so


class KindCluster(Clients):
    """One kind cluster."""

    provider = "kind"

    def __init__(
        self, kind: KindProvider, *, name: str, kubeconfig: Path, programs: Programs, data_port: int, nodes: int
    ) -> None:
        """Bind to a cluster that runs."""
        super().__init__(kubeconfig=kubeconfig, programs=programs)
        self._kind = kind
        self.name = name
        self.data_port = data_port
        self.data_url = f"http://127.0.0.1:{data_port}"
        version = json.loads(self.kubectl("version", "--output=json"))
        self.version: str = version["serverVersion"]["gitVersion"]
        self.nodes = nodes

    def load_image(self, tag: str) -> None:
        """Copy an image of the local Docker engine into every node."""
        self._kind.run("load", "docker-image", tag, "--name", self.name)

    def delete(self) -> None:
        """Remove the cluster."""
        self._kind.delete(self.name)

    def on_node(self, node: str, *command: str) -> str:
        """Run a command in a node, and return its output."""
        return self._kind.docker("exec", node, *command)

    @contextmanager
    def lost(self, node: str) -> Iterator[None]:
        """Stop every process of a node, kubelet and containers, while the context lasts; nothing there ever answers.

        The kernel does: connections are taken, and nobody reads what comes.
        """
        self._kind.docker("pause", node)
        try:
            yield
        finally:
            self._kind.docker("unpause", node)


class KindProvider:
    """Makes, finds and removes kind clusters of this cache folder."""

    def __init__(self) -> None:
        """Name the folders; nothing is started."""
        self._home = kind_cache() / "clusters"
        self._home.mkdir(parents=True, exist_ok=True)
        self._docker_host: str | None = None

    def ensure(self, *, name: str, nodes: int = 1, data_port: int = 18080) -> KindCluster:
        """Return the cluster `name`, made anew where it is missing, broken, restarted or of another configuration."""
        with self._locked(name):
            started = time.monotonic()
            with self._locked(_ENGINE):
                self._key_file(name).touch()  # from here on the engine is in use, and `delete` has something to do
                run_script("kind/dockerd.sh", "start")
            programs = self._prepare()
            config = self._config(nodes=nodes, data_port=data_port)
            if not self._usable(name, config):
                self._create(name, config)
                print(f"[step] cluster {name} … took {time.monotonic() - started:.0f}s", flush=True)
            return KindCluster(
                self, name=name, kubeconfig=self.kubeconfig(name), programs=programs, data_port=data_port, nodes=nodes
            )

    def names(self) -> list[str]:
        """Return the clusters that were made from this cache folder and not removed since."""
        return sorted(path.stem for path in self._home.glob("*.key"))

    def kubeconfig(self, name: str) -> Path:
        """Return the path of a cluster's kubeconfig."""
        return self._home / f"{name}.kubeconfig"

    def delete(self, name: str) -> None:
        """Remove a cluster; with the last one also kind's network and the Docker engine, if it was started for it."""
        with self._locked(name):
            if name in self.names():
                self._remove(name)
        self._stop_unused_engine()

    def delete_all(self) -> None:
        """Remove every cluster of this cache folder."""
        for name in self.names():
            self.delete(name)
        self._stop_unused_engine()

    def run(self, *arguments: str) -> str:
        """Run kind against the Docker engine and return its output."""
        done = subprocess.run(
            [_program("kind"), *arguments], env=self._environment(), text=True, capture_output=True, check=False
        )
        if done.returncode != 0:
            raise ClusterError(f"kind {' '.join(arguments)} ended with status {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _prepare(self) -> Programs:
        run_script("kind/tools.sh", "kind", "helm")
        run_script("kind/kube-binaries.sh", "kubectl")
        return Programs(kubectl=_kubectl(), helm=_program("helm"))

    def _config(self, *, nodes: int, data_port: int) -> KindConfig:
        site = Path(_printed_by("images/site.sh", "path"))
        engines, models = cache_root() / "engines", cache_root() / "models"
        for folder in (site, engines, models):
            folder.mkdir(parents=True, exist_ok=True)
        image = _printed_by("kind/choose-image.sh")
        return KindConfig(image=image, nodes=nodes, data_port=data_port, site=site, engines=engines, models=models)

    def _usable(self, name: str, config: KindConfig) -> bool:
        known = self._key_file(name).read_text()
        return known != "" and known == self._identity(name, config) and self._answers(name, seconds=60)

    def _identity(self, name: str, config: KindConfig) -> str:
        """Return a text that stays the same until a node stops: what ran before is not to be revived half done."""
        containers = self._containers(name)
        states = "{{.Id}} {{.State.Running}} {{.State.StartedAt}}"
        running = self.docker("inspect", "--format", states, *containers) if containers else ""
        return f"{config.key()}\n{running}"

    def _answers(self, name: str, *, seconds: float) -> bool:
        kubectl = _kubectl()
        command = [kubectl, f"--kubeconfig={self.kubeconfig(name)}", "--request-timeout=5s", "get", "--raw=/readyz"]
        deadline = time.monotonic() + seconds
        while subprocess.run(command, capture_output=True, check=False).returncode != 0:
            if time.monotonic() > deadline or not self._containers(name):
                return False
            time.sleep(0.5)
        return True

    def _create(self, name: str, config: KindConfig) -> None:
        self._key_file(name).write_text("")
        kubeconfig = self.kubeconfig(name)
        self.run("delete", "cluster", "--name", name, "--kubeconfig", str(kubeconfig))
        print(f"[step] cluster {name} of {config.nodes} node(s), image {config.image}", flush=True)
        command = ["create", "cluster", "--name", name, "--image", config.image, "--config", "-"]
        done = subprocess.run(
            [_program("kind"), *command, "--kubeconfig", str(kubeconfig), "--wait", f"{_READY_SECONDS}s"],
            env=self._environment(), input=config.render(), text=True, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ClusterError(
                f"kind could not make the cluster {name}: {done.stderr.strip()[-3000:]}\n"
                f"if the port is taken, stop what listens on 127.0.0.1:{config.data_port}; then run this again"
            )
        clients = Clients(kubeconfig=kubeconfig, programs=Programs(kubectl=_kubectl(), helm=_program("helm")))
        clients.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns", f"--timeout={_READY_SECONDS}s")
        self._key_file(name).write_text(self._identity(name, config))

    def _containers(self, name: str) -> list[str]:
        label = f"label=io.x-k8s.kind.cluster={name}"
        return self.docker("ps", "--all", "--quiet", "--filter", label).split()

    def _key_file(self, name: str) -> Path:
        return self._home / f"{name}.key"

    def _remove(self, name: str) -> None:
        # Also where the engine was killed: its data, and the cluster's containers in them, are still there.
        run_script("kind/dockerd.sh", "start")
        run_script("kind/tools.sh", "kind")
        self.run("delete", "cluster", "--name", name, "--kubeconfig", str(self.kubeconfig(name)))
        if not self.run("get", "clusters", "--quiet").split():
            self.docker("network", "rm", "kind", check=False)
        for path in (self.kubeconfig(name), self._key_file(name)):
            path.unlink(missing_ok=True)

    def _stop_unused_engine(self) -> None:
        with self._locked(_ENGINE):
            if not self.names():
                self._docker_host = None
                run_script("kind/dockerd.sh", "stop")

    def _environment(self) -> dict[str, str]:
        if self._docker_host is None:
            self._docker_host = _printed_by("kind/dockerd.sh", "host")
        return {**os.environ, "DOCKER_HOST": self._docker_host}

    def docker(self, *arguments: str, check: bool = True) -> str:
        """Run the Docker client against the engine of the clusters, and return its output."""
        done = subprocess.run(
            ["docker", *arguments], env=self._environment(), text=True, capture_output=True, check=False
        )
        if check and done.returncode != 0:
            raise ClusterError(
                f"docker {' '.join(arguments)} ended with status {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        # Two test runs (or the workers of one) may ask for the same cluster at once.
        with (self._home / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _kubectl() -> str:
    return str(kind_cache() / "kube" / "bin" / "kubectl")


def _program(name: str) -> str:
    built = kind_cache() / "bin" / name
    found = str(built) if built.exists() else shutil.which(name)
    if found is None:
        raise ClusterError(f"{name} is neither in {built.parent} nor on PATH; run: make cluster-up")
    return found


def _printed_by(script: str, *arguments: str) -> str:
    done = subprocess.run([str(HACK / script), *arguments], text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise ClusterError(f"hack/{script} {' '.join(arguments)} ended with status {done.returncode}; see above")
    return done.stdout.strip().splitlines()[-1]
