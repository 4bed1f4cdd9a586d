"""An S3 server in the demo's cluster: versions are published to it from this machine, and pods fetch them from there.

Refuses to know what is published and when.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.store import S3Store

from demo.console import command, step
from tests.support.cache import REPOSITORY
from tests.support.cluster.provider import Cluster
from tests.support.reaching import port_forward

IMAGE: Final = "object-store"
BUCKET: Final = "models"
_MANIFESTS: Final = REPOSITORY / "demo/object-store.yaml"
_NAME: Final = "object-store"


class ObjectStore:
    """The server, and the one bucket that it has.

    Args:
        cluster: where it runs.
        namespace: that of the slot.
        folder: of the bucket, for the slot's versions.
    """

    def __init__(self, cluster: Cluster, *, namespace: str, folder: str) -> None:
        self._cluster, self._namespace, self._folder = cluster, namespace, folder

    def uri(self, version: str) -> str:
        """Return where a version is."""
        return f"s3://{BUCKET}/{self._folder}/{version}"

    def install(self) -> None:
        """Start it, empty."""
        self._kubectl("delete", "pod", _NAME, "--ignore-not-found", "--wait")
        command(["kubectl", "apply", "-f", str(_MANIFESTS.relative_to(REPOSITORY))])
        self._kubectl("apply", "-f", str(_MANIFESTS))
        with step("an S3 server in the cluster"):
            self._kubectl("wait", f"pod/{_NAME}", "--for=condition=Ready", "--timeout=180s")

    def values(self) -> dict[str, Any]:
        """Return what the engine's chart must be told."""
        credentials = {"name": "models", "secretName": _NAME, "prefixes": [f"s3://{BUCKET}"]}
        allow = [f"s3://{BUCKET}/{self._folder}"]
        return {"sources": {"allow": allow, "credentials": [credentials], "store": {"sizeLimit": "2Gi"}}}

    def publish(self, folder: Path, version: str, *, base: str = "", options: Sequence[str] = ()) -> None:
        """Publish a checkpoint, and show how: all of it, or what is new in it."""
        words = ["publish", str(folder), self.uri(version), *(("--base", self.uri(base)) if base else ()), *options]
        command(["modelswap", *words])
        with self._reached() as keys:
            subprocess.run([sys.executable, "-m", "modelswap_engine", *words], check=True, env={**os.environ, **keys})

    def put(self, folder: Path, version: str) -> None:
        """Copy files as they are, as somebody might who does not look at them."""
        with self._reached() as keys:
            settings: Any = {key.lower(): value for key, value in keys.items() if key != "AWS_ALLOW_HTTP"}
            store = S3Store(BUCKET, config=settings, client_options={"allow_http": True})
            for file in folder.iterdir():
                if not file.name.startswith("."):
                    with file.open("rb") as stream:
                        obstore.put(store, f"{self._folder}/{version}/{file.name}", stream)

    @contextmanager
    def _reached(self) -> Iterator[Mapping[str, str]]:
        """Yield the settings by which this machine reaches it."""
        secret = json.loads(self._kubectl("get", "secret", _NAME, "-o", "json"))["data"]
        keys = {name: b64decode(value).decode() for name, value in secret.items()}
        with port_forward(self._cluster, namespace=self._namespace, pod=_NAME, port=7070) as url:
            yield {**keys, "AWS_ENDPOINT": url}

    def _kubectl(self, *arguments: str) -> str:
        return self._cluster.kubectl("-n", self._namespace, *arguments)
