"""Flux's real controllers as processes of this machine, following one folder of a git repository.

They run as in a cluster, but outside of it: they speak to its API server by a kubeconfig, and read git over loopback.
Refuses to know what is applied and what is expected of it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.support.cache import REPOSITORY, cache_root, run_script
from tests.support.cluster.provider import Cluster
from tests.support.free_ports import free_port
from tests.support.processes import Child

Json = dict[str, Any]
FLUX = "flux-system"
_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """What a controller says of a commit: ``verdict`` in its own word, ``settled`` when it has made up its mind."""

    commit: str
    verdict: str
    detail: str


class Controller(Protocol):
    """A GitOps controller that follows one folder."""

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


class FluxKustomization:
    """The Kustomization of `contrib/flux`, with the times of a test."""

    good, bad = "True/ReconciliationSucceeded", "False/HealthCheckFailed"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def refresh(self) -> None:
        for thing in ("gitrepository/models", "kustomization/models"):
            mark = f"reconcile.fluxcd.io/requestedAt={uuid.uuid4()}"
            self._cluster.kubectl("-n", FLUX, "annotate", thing, mark, "--overwrite")

    def health(self) -> Health:
        status = self._get().get("status", {})
        ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
        return Health(
            commit=str(status.get("lastAttemptedRevision", "")).rpartition(":")[2],
            verdict=f"{ready.get('status')}/{ready.get('reason')}",
            detail=str(ready.get("message")),
        )

    def applied(self) -> list[str]:
        """An entry's id is ``namespace_name_group_kind``."""
        ids = [entry["id"].split("_") for entry in self._get()["status"]["inventory"]["entries"]]
        return sorted(f"{kind}/{name}" for _, name, _, kind in ids)

    def _get(self) -> Json:
        return _json(self._cluster, "-n", FLUX, "get", "kustomization", "models")


@contextlib.contextmanager
def flux(cluster: Cluster, folder: Path, *, url: str, slot: str, namespace: str) -> Iterator[FluxKustomization]:
    """Run Flux's source- and kustomize-controller on a repository, until the context ends."""
    _install(cluster, FLUX, "source-controller", "kustomize-controller")
    storage, address = folder / "storage", f"127.0.0.1:{free_port()}"
    storage.mkdir(parents=True)
    common = [
        "--events-addr=",
        "--watch-all-namespaces=true",
        "--enable-leader-election=false",
        "--metrics-addr=127.0.0.1:0",
    ]
    own = {
        "source-controller": [
            f"--storage-path={storage}",
            f"--storage-addr={address}",
            f"--storage-adv-addr={address}",
        ],
        "kustomize-controller": ["--feature-gates=CancelHealthCheckOnNewRevision=true"],
    }
    with contextlib.ExitStack() as running:
        for name, options in own.items():
            port = free_port()
            command = [str(programs() / name), *common, f"--health-addr=127.0.0.1:{port}", *options]
            _start(running, cluster, folder, name, command, port=port, RUNTIME_NAMESPACE=FLUX)
        kustomization = yaml.safe_load((REPOSITORY / "contrib/flux/kustomization.yaml").read_text())
        kustomization["spec"] |= {"interval": "10m", "retryInterval": "5s", "timeout": "180s"}
        kustomization["spec"]["healthChecks"][0] |= {"name": slot, "namespace": namespace}
        repository = {
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "GitRepository",
            "metadata": {"name": "models", "namespace": FLUX},
            "spec": {"interval": "10m", "url": url, "ref": {"branch": "main"}},
        }
        _apply(cluster, repository, kustomization)
        try:
            yield FluxKustomization(cluster)
        finally:  # while the controllers run: both objects have finalizers
            for thing in ("kustomization/models", "gitrepository/models"):
                cluster.kubectl("-n", FLUX, "delete", thing, "--ignore-not-found", "--timeout=60s")


def programs() -> Path:
    """Return the folder that `hack/gitops/build.sh` fills."""
    return cache_root() / "gitops" / "bin"


def _install(cluster: Cluster, namespace: str, *programs: str) -> None:
    """Build what is missing, and give the cluster the namespace and the definitions of the controllers' own objects."""
    run_script("gitops/build.sh", *programs)
    _apply(cluster, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for name in programs:
        definitions = str(cache_root() / "gitops" / "crds" / f"{name}.yaml")
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", definitions)
        cluster.kubectl("wait", "--for=condition=Established", "-f", definitions, "--timeout=60s")


def _start(
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


def _apply(cluster: Cluster, *objects: Json) -> None:
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))


def _json(cluster: Cluster, *arguments: str) -> Json:
    found: Json = json.loads(cluster.kubectl(*arguments, "-o", "json"))
    return found
