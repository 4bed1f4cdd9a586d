"""The one interface to a Kubernetes cluster that tests and the demo use, and what every cluster can do.

Refuses to know where a cluster comes from: `kind.py` makes one, `existing.py` uses one that is there.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

DATA_NODE_PORT = 30080
"""The NodePort under which a Service is reached from outside the cluster, at `Cluster.data_url`."""


class ClusterError(RuntimeError):
    """A cluster could not be had or did not do what it was asked; the message says what to do next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The client programs, as paths."""

    kubectl: str
    helm: str


class Cluster(Protocol):
    """A running cluster."""

    name: str
    provider: str
    version: str
    kubeconfig: Path
    data_port: int
    data_url: str

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return its output."""

    def try_kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return what came of it: for what is expected to fail."""

    def helm(self, *arguments: str) -> str:
        """Run helm and return its output."""

    def load_image(self, tag: str) -> None:
        """Make an image of the local Docker engine available to every node."""

    def delete(self) -> None:
        """Remove the cluster, where it is ours to remove."""


class Provider(Protocol):
    """Where clusters come from."""

    def ensure(self, *, name: str, nodes: int = 1, data_port: int = 18080) -> Cluster:
        """Return a usable cluster; cheap where it runs already."""

    def delete(self, name: str) -> None:
        """Remove a cluster, where it is ours to remove."""


class Clients:
    """kubectl and helm of one cluster: never the user's own current context."""

    def __init__(self, *, kubeconfig: Path, programs: Programs) -> None:
        """Bind the programs to a kubeconfig."""
        self.kubeconfig = kubeconfig
        self._programs = programs

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return its output; raise with its message where it fails."""
        return _output("kubectl", arguments, self.try_kubectl(*arguments, stdin=stdin))

    def try_kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return what came of it."""
        return self._run(self._programs.kubectl, arguments, stdin)

    def helm(self, *arguments: str) -> str:
        """Run helm and return its output; raise with its message where it fails."""
        return _output("helm", arguments, self._run(self._programs.helm, arguments, None))

    def _run(self, program: str, arguments: tuple[str, ...], stdin: str | None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        # Without input, stdin is empty and not the terminal: no program may wait for a person.
        return subprocess.run(
            [program, *arguments], input=stdin or "", text=True, capture_output=True, env=environment, check=False
        )


def _output(program: str, arguments: tuple[str, ...], done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode != 0:
        message = done.stderr.strip() or done.stdout.strip()
        raise ClusterError(f"{program} {' '.join(arguments)} ended with status {done.returncode}: {message}")
    return done.stdout
