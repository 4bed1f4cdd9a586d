"""A cluster that is there already: named by MODELSWAP_KUBECONFIG, never created, never removed.

Its nodes must be able to get the images: MODELSWAP_IMAGE_LOADER is a command that takes an image's tag as its last
word (`minikube image load`, `k3d image import`). Refuses to change anything outside what the caller installs.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.cache import kind_cache
from tests.support.cluster.provider import DATA_NODE_PORT, Clients, ClusterError, Programs


class ExistingCluster(Clients):
    """The cluster behind a kubeconfig of the user's."""

    provider = "existing"

    def __init__(self, *, name: str, kubeconfig: Path, programs: Programs) -> None:
        """Bind to the cluster, which must answer."""
        super().__init__(kubeconfig=kubeconfig, programs=programs)
        self.name = name
        version = json.loads(self.kubectl("version", "--output=json", "--request-timeout=20s"))
        self.version: str = version["serverVersion"]["gitVersion"]
        self.data_url = os.environ.get("MODELSWAP_DATA_URL") or self._node_url()
        self.data_port = urlsplit(self.data_url).port or 80

    def load_image(self, tag: str) -> None:
        """Hand an image to the cluster by the command that the user named for it."""
        loader = os.environ.get("MODELSWAP_IMAGE_LOADER")
        if not loader:
            raise ClusterError(
                f"the image {tag} must get to the nodes of {self.name}: set MODELSWAP_IMAGE_LOADER to a command that "
                'does it, such as "minikube image load"'
            )
        done = subprocess.run([*shlex.split(loader), tag], text=True, capture_output=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"{loader} {tag} ended with status {done.returncode}: {done.stderr.strip()}")

    def delete(self) -> None:
        """Do nothing: the cluster is its owner's."""

    def _node_url(self) -> str:
        path = '{.items[0].status.addresses[?(@.type=="InternalIP")].address}'
        return f"http://{self.kubectl('get', 'nodes', '--output', f'jsonpath={path}')}:{DATA_NODE_PORT}"


class ExistingProvider:
    """Hands out the one cluster there is."""

    def __init__(self, kubeconfig: Path) -> None:
        """Name the cluster by its kubeconfig."""
        if not kubeconfig.exists():
            raise ClusterError(f"MODELSWAP_KUBECONFIG names {kubeconfig}, which does not exist")
        self._kubeconfig = kubeconfig

    def ensure(self, *, name: str, nodes: int = 1, data_port: int = DATA_NODE_PORT) -> ExistingCluster:
        """Return the cluster if it answers and has nodes enough; its ports are what they are."""
        programs = Programs(kubectl=_program("kubectl"), helm=_program("helm"))
        cluster = ExistingCluster(name=name, kubeconfig=self._kubeconfig, programs=programs)
        have = len(cluster.kubectl("get", "nodes", "--output=name").split())
        if have < nodes:
            raise ClusterError(f"{nodes} nodes are needed, the cluster of MODELSWAP_KUBECONFIG has {have}")
        return cluster

    def delete(self, name: str) -> None:
        """Do nothing: the cluster is its owner's."""


def _program(name: str) -> str:
    for folder in (kind_cache() / "bin", kind_cache() / "kube" / "bin"):
        if (folder / name).exists():
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise ClusterError(f"{name} is not on PATH; install it to use the cluster of MODELSWAP_KUBECONFIG")
    return found
