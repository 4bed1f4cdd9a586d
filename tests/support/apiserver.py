"""A bare Kubernetes API for fast tests: etcd and kube-apiserver (and on request its controllers), without nodes.

For schemas, server-side apply, watches, RBAC, tokens, leader election, outages and compaction. Refuses to know what
is tested with it. Without controllers nothing is garbage-collected, namespaces stay in deletion, and no default
service account appears (pods are admitted without one).
"""

from __future__ import annotations

import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.support.cache import kube_binaries
from tests.support.free_ports import free_port
from tests.support.pki import Pki, make_pki
from tests.support.processes import Child

START_SECONDS = 90.0
ISSUER = "https://kubernetes.default.svc"


class ApiServer:
    """One API server of its own on loopback; `kubeconfig` is its administrator's."""

    def __init__(self, home: Path, *, controllers: bool = False) -> None:
        """Choose ports and make keys below `home`; nothing runs before `start`."""
        names = ["etcd", "kube-apiserver", "kubectl", *(["kube-controller-manager"] if controllers else [])]
        self._bin = kube_binaries(*names)
        self._home = home
        self._controllers_wanted = controllers
        self._port, self._etcd_port, self._peer_port = (free_port() for _ in range(3))
        self._pki: Pki = make_pki(home / "pki")
        self._etcd: Child | None = None
        self._server: Child | None = None
        self._controllers: Child | None = None
        self.url = f"https://127.0.0.1:{self._port}"
        self.etcd_url = f"http://127.0.0.1:{self._etcd_port}"
        self.kubeconfig = home / "admin.kubeconfig"
        self._pki.write_kubeconfig(self.kubeconfig, server=self.url, user="admin", group="system:masters")

    @property
    def ca(self) -> Path:
        """Return the certificate that the server's own is signed by."""
        return self._pki.ca

    def kubeconfig_of(self, user: str, *, group: str | None = None) -> Path:
        """Return a kubeconfig for another user, who has no rights but those that RBAC gives."""
        path = self._home / f"{user.replace(':', '-')}.kubeconfig"
        self._pki.write_kubeconfig(path, server=self.url, user=user, group=group)
        return path

    def start(self) -> None:
        """Start everything and wait until the API is ready."""
        self._etcd = self._spawn(
            "etcd",
            f"--data-dir={self._home / 'etcd'}",
            f"--listen-client-urls={self.etcd_url}",
            f"--advertise-client-urls={self.etcd_url}",
            f"--listen-peer-urls=http://127.0.0.1:{self._peer_port}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        self.start_apiserver()
        if self._controllers_wanted:
            self._start_controllers()

    def start_apiserver(self) -> None:
        """Start kube-apiserver on the ports and data it had, and wait until it is ready: the end of an outage."""
        admission = [] if self._controllers_wanted else ["--disable-admission-plugins=ServiceAccount"]
        self._server = self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self.etcd_url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.98.0.0/16",
            f"--client-ca-file={self._pki.ca}",
            f"--tls-cert-file={self._pki.server_certificate}",
            f"--tls-private-key-file={self._pki.server_key}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={self._pki.account_public_key}",
            f"--service-account-signing-key-file={self._pki.account_key}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged",
            *admission,
        )
        self._wait_ready(self._server)

    def stop_apiserver(self, *, kill: bool = False) -> None:
        """Stop kube-apiserver and leave its data: the beginning of an outage. `kill` cuts open watches at once."""
        if self._server is not None:
            if kill:
                self._server.kill()
            else:
                self._server.stop()
            self._server = None

    def stop(self) -> None:
        """Stop everything; the API server before its etcd, without which it would not end for long."""
        if self._controllers is not None:
            self._controllers.stop()
        self.stop_apiserver()
        if self._etcd is not None:
            self._etcd.stop()
        self._controllers = self._etcd = None

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return its output; raise with its message where it fails."""
        done = self.try_kubectl(*arguments, stdin=stdin)
        if done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def try_kubectl(
        self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl and return what came of it: for what is expected to be refused."""
        command = [
            str(self._bin / "kubectl"),
            f"--kubeconfig={kubeconfig or self.kubeconfig}",
            f"--cache-dir={self._home / 'kubectl-cache'}",
            *arguments,
        ]
        # Without input, stdin is empty and not the terminal: kubectl must never wait for a person.
        return subprocess.run(command, input=stdin or "", text=True, capture_output=True, check=False, timeout=120)

    def __enter__(self) -> Self:
        """Start."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop."""
        self.stop()

    def _start_controllers(self) -> None:
        account = "system:kube-controller-manager"
        self._controllers = self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig_of(account)}",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self._pki.account_key}",
            f"--root-ca-file={self._pki.ca}",
            "--leader-elect=false",
            "--secure-port=0",
        )
        self.kubectl("wait", "--for=create", "serviceaccount/default", "-n", "default", "--timeout=60s")

    def _spawn(self, program: str, *arguments: str) -> Child:
        return Child(program, [str(self._bin / program), *arguments], log=self._home / f"{program}.log")

    def _wait_ready(self, server: Child) -> None:
        context = ssl.create_default_context(cafile=str(self._pki.ca))
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", context=context, timeout=5):
                    return
            except (urllib.error.URLError, OSError) as error:
                server.check()
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"kube-apiserver was not ready after {START_SECONDS:.0f} s ({error}); "
                        f"the end of {server.log}:\n{server.tail()}"
                    ) from error
            time.sleep(0.05)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One bare API server for the whole run: make namespaces of your own, and leave it running."""
    with ApiServer(tmp_path_factory.mktemp("apiserver")) as server:
        yield server


@pytest.fixture
def own_api_server(tmp_path: Path) -> Iterator[ApiServer]:
    """A bare API server of this test alone: for outages, compaction and cluster-wide objects."""
    with ApiServer(tmp_path) as server:
        yield server
