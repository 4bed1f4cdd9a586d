"""cert-manager's own controllers beside an API server, and what a kubelet would make of the Secrets that they write.

Its webhook is not among them: what only that refuses is not refused here. Refuses to know what is asked of it.
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.apiserver import ApiServer
from tests.support.cache import cache_root, run_script
from tests.support.processes import Child

NAMESPACE = "cert-manager"
"""Where ClusterIssuers have their Secrets."""

_WAIT = "--timeout=60s"


@contextmanager
def cert_manager(server: ApiServer, folder: Path) -> Iterator[Child]:
    """Run the controllers until the context ends; what is missing is built."""
    run_script("certmanager/build.sh")
    cache = cache_root() / "certmanager"
    server.kubectl("apply", "--server-side", "-f", str(cache / "crds.yaml"))
    server.kubectl("wait", "--for=condition=Established", "-f", str(cache / "crds.yaml"), _WAIT)
    server.kubectl("create", "namespace", NAMESPACE)
    command = (str(cache / "controllers"), f"--kubeconfig={server.kubeconfig}")
    child = Child("cert-manager", command, log=folder / "cert-manager.log")
    try:
        yield child
    finally:
        child.stop()


class Certificates:
    """Certificates of one namespace, as `kubectl` has them."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._server = server
        self._namespace = namespace

    def apply(self, thing: Mapping[str, Any]) -> None:
        """Apply a Certificate and wait until a Secret holds what it asks for now."""
        found = self._kubectl("apply", "-f", "-", "-o", "json", stdin=json.dumps(thing))
        self.wait_issued(thing["metadata"]["name"], generation=json.loads(found)["metadata"]["generation"])

    def wait_issued(self, name: str, *, generation: int) -> None:
        """Wait until it is Ready, as cert-manager says of this generation."""
        holds = f"jsonpath={{.status.conditions[?(@.type=='Ready')].observedGeneration}}={generation}"
        self._kubectl("wait", f"certificate/{name}", f"--for={holds}", _WAIT)
        self._kubectl("wait", f"certificate/{name}", "--for=condition=Ready", _WAIT)

    def revision(self, name: str) -> int:
        """Return how often it was issued."""
        return int(json.loads(self._kubectl("get", "certificate", name, "-o", "json"))["status"]["revision"])

    def renew(self, name: str) -> None:
        """Ask for another one now, as `cmctl renew` does."""
        condition = {
            "type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "by a test",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }  # fmt: skip
        patch = json.dumps([{"op": "add", "path": "/status/conditions/-", "value": condition}])
        self._kubectl("patch", "certificate", name, "--subresource=status", "--type=json", f"--patch={patch}")

    def secret(self, name: str) -> dict[str, bytes]:
        """Return what a Secret holds, nothing where there is none."""
        text = self._kubectl("get", "secret", name, "-o", "json", "--ignore-not-found")
        data = json.loads(text).get("data", {}) if text else {}
        return {key: base64.b64decode(value) for key, value in data.items()}

    def delete_secret(self, name: str) -> None:
        self._kubectl("delete", "secret", name)

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self._server.kubectl("-n", self._namespace, *arguments, stdin=stdin)


class Volume:
    """A folder as a kubelet fills it: every file leads through one link, and that is exchanged.

    Stands for the kubelet, which a bare API server does not have; it brings what is there when a test says so.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._numbers = itertools.count(1)
        self._filled: Path | None = None

    def bring(self, files: Mapping[str, bytes]) -> None:
        """Exchange the files all at once."""
        before = self._filled
        self._filled = filled = self.folder / f"..{next(self._numbers)}"
        filled.mkdir()
        for name, content in files.items():
            (filled / name).write_bytes(content)
        link = self.folder / "..data.new"
        link.symlink_to(filled.name)
        link.replace(self.folder / "..data")
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        if before is not None:
            shutil.rmtree(before)
