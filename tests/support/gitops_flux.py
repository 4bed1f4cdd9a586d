"""Flux as a GitOps controller: source- and kustomize-controller, and the Kustomization of `contrib/flux`."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.support.cache import REPOSITORY
from tests.support.cluster.provider import Cluster
from tests.support.free_ports import free_port
from tests.support.gitops import Health, Json, apply, get_json, install, programs, start

FLUX = "flux-system"


class FluxKustomization:
    """The Kustomization of `contrib/flux`, with the times of a test."""

    busy, good, bad = "Unknown/Progressing", "True/ReconciliationSucceeded", "False/HealthCheckFailed"

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
        return get_json(self._cluster, "-n", FLUX, "get", "kustomization", "models")


@contextlib.contextmanager
def flux(cluster: Cluster, folder: Path, *, url: str, slot: str, namespace: str) -> Iterator[FluxKustomization]:
    """Run Flux's source- and kustomize-controller on a repository, until the context ends."""
    install(cluster, FLUX, "source-controller", "kustomize-controller")
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
            start(running, cluster, folder, name, command, port=port, RUNTIME_NAMESPACE=FLUX)
        kustomization = yaml.safe_load((REPOSITORY / "contrib/flux/kustomization.yaml").read_text())
        kustomization["spec"] |= {"interval": "10m", "retryInterval": "5s", "timeout": "180s"}
        kustomization["spec"]["healthChecks"][0] |= {"name": slot, "namespace": namespace}
        repository = {
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "GitRepository",
            "metadata": {"name": "models", "namespace": FLUX},
            "spec": {"interval": "10m", "url": url, "ref": {"branch": "main"}},
        }
        apply(cluster, repository, kustomization)
        try:
            yield FluxKustomization(cluster)
        finally:  # while the controllers run: both objects have finalizers
            for thing in ("kustomization/models", "gitrepository/models"):
                cluster.kubectl("-n", FLUX, "delete", thing, "--ignore-not-found", "--timeout=60s")
