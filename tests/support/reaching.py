"""How tests and the demo reach into a cluster: ports of pods, control ports as the operator speaks to them, SIGKILL.

It knows neither slots nor charts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import stamina

from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import CheckResult
from tests.support.cache import kube_binaries
from tests.support.cluster.provider import Cluster

T = TypeVar("T")
WAIT = "--timeout=180s"


def _busy(error: Exception) -> bool:
    """Say whether a check was refused because an operation is in progress: a check has no other conflict."""
    return isinstance(error, urllib.error.HTTPError) and error.code == 409


class Control:
    """A control port, spoken to as the operator would."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    def state(self) -> EngineState:
        """``GET /state``."""
        return self._call("GET", "state", None, EngineState)

    def check(self) -> CheckResult:
        """``POST /check`` of every tensor; it gives way to an operation, and is asked for again then."""
        for attempt in stamina.retry_context(on=_busy, attempts=None, timeout=60):
            with attempt:
                return self._call("POST", "check", b"{}", CheckResult)
        raise AssertionError  # the last attempt raises

    def _call(self, method: str, route: str, body: bytes | None, kind: type[T]) -> T:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/modelswap/v1/{route}", data=body, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return msgspec.json.decode(answer.read(), type=kind)


@contextlib.contextmanager
def port_forward(cluster: Cluster, *, namespace: str, pod: str, port: int) -> Iterator[str]:
    """Forward a port of a pod to loopback; yields its URL."""
    process = subprocess.Popen(
        [kubectl_program(), "-n", namespace, "port-forward", f"pod/{pod}", f":{port}", "--address=127.0.0.1"],
        env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert found, f"port-forward to {pod} said: {line}"
        yield f"http://127.0.0.1:{found.group(1)}"
    finally:
        process.terminate()
        process.wait(10)


_KILL = """
import os, pathlib, signal, sys
for process in pathlib.Path('/proc').iterdir():
    if process.name.isdigit() and int(process.name) != os.getpid():
        try:
            environ, command = (process / 'environ').read_bytes(), (process / 'cmdline').read_bytes()
        except OSError:
            continue
        if sys.argv[1].encode() in environ.split(bytes(1)) and b'embedded.worker' not in command:
            os.kill(int(process.name), signal.SIGKILL)
            print('killed', process.name, command)
"""


def kill_on_node(cluster: Cluster, *, node: str, needle: str) -> None:
    """SIGKILL the front process whose environment holds an entry, from a privileged pod on its node."""
    container = {
        "name": "killer",
        "image": "modelswap/operator:dev",
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", _KILL, needle],
        "securityContext": {"privileged": True, "runAsUser": 0},
    }
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "killer", "namespace": "default"},
        "spec": {"hostPID": True, "nodeName": node, "restartPolicy": "Never", "containers": [container]},
    }
    cluster.kubectl("-n", "default", "delete", "pod", "killer", "--ignore-not-found", WAIT)
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    cluster.kubectl("-n", "default", "wait", "pod/killer", "--for=jsonpath={.status.phase}=Succeeded", WAIT)
    assert "killed" in cluster.kubectl("-n", "default", "logs", "killer"), f"no process has {needle}"
    cluster.kubectl("-n", "default", "delete", "pod", "killer", WAIT)


def kubectl_program() -> str:
    """Return the path of kubectl, for what must run beside the test."""
    return str(kube_binaries("kubectl") / "kubectl")
