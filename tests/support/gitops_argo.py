"""Argo CD as a GitOps controller: application-controller, repo-server and their cache, and one Application.

It knows of ModelVersions what `contrib/argocd` tells it.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support.cache import REPOSITORY
from tests.support.cluster.provider import Cluster
from tests.support.free_ports import free_port
from tests.support.gitops import Health, Json, apply, get_json, install, programs, start

ARGO = "argocd"
CONFIG = REPOSITORY / "contrib/argocd/argocd-cm.yaml"


class ArgoApplication:
    """An Application that syncs what is pushed. Nothing heals it: what once differs from Git is OutOfSync for good."""

    busy, good, bad = "Synced/Progressing", "Synced/Healthy", "Synced/Degraded"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def refresh(self) -> None:
        mark = "argocd.argoproj.io/refresh=normal"
        self._cluster.kubectl("-n", ARGO, "annotate", "application", "models", mark, "--overwrite")

    def health(self) -> Health:
        status = self._get().get("status", {})
        sync, health = status.get("sync", {}), status.get("health", {})
        return Health(
            commit=str(sync.get("revision", "")),
            verdict=f"{sync.get('status')}/{health.get('status')}",
            detail=json.dumps(status.get("conditions", [])),
        )

    def applied(self) -> list[str]:
        return sorted(f"{item['kind']}/{item['name']}" for item in self._get()["status"]["resources"])

    def _get(self) -> Json:
        return get_json(self._cluster, "-n", ARGO, "get", "application", "models")


@contextlib.contextmanager
def argo_cd(cluster: Cluster, folder: Path, *, url: str, namespace: str) -> Iterator[ArgoApplication]:
    """Run Argo CD on a repository, until the context ends."""
    install(cluster, ARGO, "argocd")
    cluster.kubectl("apply", "--server-side", "--field-manager=modelswap", "-f", str(CONFIG))
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "argocd-secret", "namespace": ARGO, "labels": {"app.kubernetes.io/part-of": "argocd"}},
        "stringData": {"server.secretkey": uuid.uuid4().hex},
    }
    project = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "AppProject",
        "metadata": {"name": "default", "namespace": ARGO},
        "spec": {"sourceRepos": ["*"], "destinations": [{"namespace": "*", "server": "*"}]},
    }
    application = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Application",
        "metadata": {"name": "models", "namespace": ARGO, "finalizers": ["resources-finalizer.argocd.argoproj.io"]},
        "spec": {
            "project": "default",
            "source": {"repoURL": url, "path": "models", "targetRevision": "main"},
            "destination": {"server": "https://kubernetes.default.svc", "namespace": namespace},
            "syncPolicy": {
                "automated": {"prune": True},
                "retry": {"limit": 5, "refresh": True},  # else a sync that failed is repeated before a revert is seen
                "syncOptions": ["ServerSideApply=true"],
            },
        },
    }
    apply(cluster, secret, project)
    with contextlib.ExitStack() as running:
        _start_all(running, cluster, folder)
        apply(cluster, application)
        try:
            yield ArgoApplication(cluster)
        finally:  # while the controller runs: its finalizer takes the ModelVersion along
            cluster.kubectl("-n", ARGO, "delete", "application", "models", "--ignore-not-found", "--timeout=60s")


def _start_all(running: contextlib.ExitStack, cluster: Cluster, folder: Path) -> None:
    keys, scratch = folder / "gpg", folder / "scratch"
    keys.mkdir(parents=True, mode=0o700)
    scratch.mkdir()
    # Outside a cluster: the in-cluster destination is that of the kubeconfig, and nobody signs commits.
    settings = {
        "ARGOCD_FAKE_IN_CLUSTER": "true",
        "ARGOCD_GPG_ENABLED": "false",
        "ARGOCD_GNUPGHOME": str(keys),
        "TMPDIR": str(scratch),
    }
    cache, repo, metrics = free_port(), free_port(), free_port()
    store = ["redis-server", "--port", str(cache), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    start(running, cluster, folder, "redis", store, port=cache)
    roles = {
        "argocd-repo-server": [
            "--address=127.0.0.1",
            f"--port={repo}",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={free_port()}",
            "--disable-tls",
        ],
        "argocd-application-controller": [
            f"--namespace={ARGO}",
            f"--repo-server=127.0.0.1:{repo}",
            "--repo-server-plaintext",
            f"--metrics-port={metrics}",
        ],
    }
    for (role, options), port in zip(roles.items(), (repo, metrics), strict=True):
        command = [str(programs() / "argocd"), f"--redis=127.0.0.1:{cache}", *options]
        start(running, cluster, folder, role, command, port=port, ARGOCD_BINARY_NAME=role, **settings)
