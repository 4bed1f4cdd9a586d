"""Real GitOps controllers as processes of this machine, following one folder of a git repository; what all share.

They run as in a cluster, but outside of it: they speak to its API server by a kubeconfig, and read git over loopback.
Refuses to know what is applied and what is expected of it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.support.cache import cache_root, run_script
from tests.support.cluster.provider import Cluster
from tests.support.processes import Child

Json = dict[str, Any]
_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """What a controller says of a commit, in its own words."""

    commit: str
    verdict: str
    detail: str


class Controller(Protocol):
    """A GitOps controller that follows one folder."""

    busy: str
    good: str
    bad: str

    def refresh(self) -> None:
        """Tell it of a push, as a webhook would."""

    def health(self) -> Health:
        """Return what it says now."""

    def applied(self) -> list[str]:
        """Return the kinds and names of what it takes for its own."""


def wait_for(controller: Controller, *, commit: str, verdict: str, seen: Callable[[Health], None]) -> None:
    """Follow a controller until it gives a verdict on a commit; each thing it says meanwhile is shown to ``seen``."""
    ends = time.monotonic() + _SECONDS
    last: Health | None = None
    while time.monotonic() < ends:
        found = controller.health()
        if found != last:
            last = found
            seen(found)
        if (found.commit, found.verdict) == (commit, verdict):
            return
        time.sleep(0.2)
    raise AssertionError(f"no {verdict} of {commit} within {_SECONDS:.0f} s; the last word was {last}")


def programs() -> Path:
    """Return the folder that `hack/gitops/build.sh` fills."""
    return cache_root() / "gitops" / "bin"


def install(cluster: Cluster, namespace: str, *programs: str) -> None:
    """Build what is missing, and give the cluster the namespace and the definitions of the controllers' own objects."""
    run_script("gitops/build.sh", *programs)
    apply(cluster, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for name in programs:
        definitions = str(cache_root() / "gitops" / "crds" / f"{name}.yaml")
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", definitions)
        cluster.kubectl("wait", "--for=condition=Established", "-f", definitions, "--timeout=60s")


def start(
    running: contextlib.ExitStack,
    cluster: Cluster,
    folder: Path,
    name: str,
    command: tuple[str, ...],
    *,
    port: int,
    **env: str,
) -> None:
    """Start a program with settings of its own and wait until it listens; it is stopped with the context."""
    env["KUBECONFIG"] = str(cluster.kubeconfig)
    settings = (f"{key}={value}" for key, value in env.items())
    child = Child(name, (shutil.which("env") or "env", *settings, *command), log=folder / f"{name}.log")
    running.callback(child.stop)
    ends = time.monotonic() + 60
    while not _listens(port):
        child.check()
        if time.monotonic() > ends:
            raise AssertionError(f"{name} does not listen after 60 s; the end of its log:\n{child.tail()}")
        time.sleep(0.1)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def apply(cluster: Cluster, *objects: Json) -> None:
    """Apply objects of the controller's own."""
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))


def get_json(cluster: Cluster, *arguments: str) -> Json:
    """Ask kubectl for an object."""
    found: Json = json.loads(cluster.kubectl(*arguments, "-o", "json"))
    return found
