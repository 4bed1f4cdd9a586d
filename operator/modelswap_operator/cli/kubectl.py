"""The cluster, seen through the kubectl that runs this plugin: the user's own kubeconfig, account and rights.

Every call is bounded in time. It refuses to know what is read or written.
"""

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from modelswap_operator.cli.failures import ClusterError, NotThereError

CALL_SECONDS: Final = 30.0
FORWARD_SECONDS: Final = 15.0
_FORWARDING: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kubectl:
    """One cluster and namespace; empty strings leave the choice to the user's kubeconfig."""

    namespace: str = ""
    everywhere: bool = False
    context: str = ""
    kubeconfig: str = ""
    program: str = "kubectl"

    def get(self, kind: str, name: str) -> Object:
        """Read one object.

        Raises:
            NotThereError: there is none of this name.
            ClusterError: it cannot be read.
        """
        found: Object = json.loads(self.run("get", kind, name, "-o", "json"))
        return found

    def items(self, kind: str, *, selector: str = "", fields: str = "", namespace: str = "") -> list[Object]:
        """Read the objects of a kind, in this namespace unless another is named.

        Raises:
            ClusterError: they cannot be read.
        """
        choice = [f"--selector={selector}"] if selector else []
        choice += [f"--field-selector={fields}"] if fields else []
        found: list[Object] = json.loads(self.run("get", kind, *choice, "-o", "json", namespace=namespace))["items"]
        return found

    def run(self, *arguments: str, stdin: str | None = None, namespace: str = "") -> str:
        """Run kubectl and return what it prints.

        Raises:
            NotThereError: what is named does not exist.
            ClusterError: it failed, or did not end in time.
        """
        command = self._command(arguments, namespace=namespace)
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=CALL_SECONDS, check=False
            )
        except FileNotFoundError:
            raise ClusterError(
                "kubectl is not on the PATH", advice="install it, or call this as `kubectl modelswap`"
            ) from None
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"kubectl {arguments[0]}: no answer within {CALL_SECONDS:g} s", advice="is the cluster reachable?"
            ) from None
        if done.returncode != 0:
            raise _failure(arguments, done.stderr)
        return done.stdout

    def watch(self, kind: str, name: str, *, seconds: float | None) -> Iterator[Object]:
        """Yield an object as it is, and then whenever it changes, for so long (None: until the caller stops).

        Raises:
            ClusterError: it cannot be watched.
        """
        arguments = ["get", kind, name, "--watch", "-o", "json"]
        process = subprocess.Popen(
            self._command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        over = threading.Event()
        timer = threading.Timer(seconds, _stop, (process, over)) if seconds is not None else None
        if timer is not None:
            timer.start()
        try:
            yield from _documents(process)
            if process.wait() != 0 and not over.is_set():
                raise _failure(arguments, process.stderr.read() if process.stderr is not None else "")
        finally:
            if timer is not None:
                timer.cancel()
            _end(process)

    @contextlib.contextmanager
    def forward(self, pod: str, port: int, *, tls: bool) -> Iterator[str]:
        """Reach a port of a pod; the address is good while the context lasts.

        Raises:
            ClusterError: no right to do so, or the pod is gone.
        """
        arguments = ["port-forward", f"pod/{pod}", f":{port}", "--address=127.0.0.1"]
        process = subprocess.Popen(
            self._command(arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        timer = threading.Timer(FORWARD_SECONDS, process.terminate)
        timer.start()
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            timer.cancel()
            found = _FORWARDING.match(line)
            if found is None:
                _end(process)
                said = process.stderr.read() if process.stderr is not None else ""
                raise _failure(arguments, said or f"nothing was said within {FORWARD_SECONDS:g} s")
            yield f"{'https' if tls else 'http'}://127.0.0.1:{found[1]}"
        finally:
            timer.cancel()
            _end(process)

    def _command(self, arguments: Sequence[str], *, namespace: str = "") -> list[str]:
        place = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        place += [f"--context={self.context}"] if self.context else []
        if namespace:
            place.append(f"--namespace={namespace}")
        elif self.everywhere and arguments[0] == "get":
            place.append("--all-namespaces")
        elif self.namespace:
            place.append(f"--namespace={self.namespace}")
        return [self.program, *arguments, *place]


def _documents(process: "subprocess.Popen[str]") -> Iterator[Object]:
    """Yield the JSON objects that a process prints one after the other."""
    decoder, text = json.JSONDecoder(), ""
    for line in process.stdout or ():
        text += line
        # kubectl ends each object with a brace alone in its line; trying to decode at other lines costs much.
        if line.rstrip("\n") != "}":
            continue
        found, end = decoder.raw_decode(text)
        text = text[end:].lstrip()
        yield found


def _stop(process: "subprocess.Popen[str]", over: threading.Event) -> None:
    over.set()
    process.terminate()


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(arguments: Sequence[str], stderr: str) -> ClusterError:
    said = stderr.strip().removeprefix("error: ").removeprefix("Error from server ") or "failed and said nothing"
    if "(NotFound)" in stderr:
        return NotThereError(said.removeprefix("(NotFound): "), advice="look at -n/--namespace and --context")
    advice = ""
    if "(Forbidden)" in stderr:
        advice = "docs/guides/kubectl.md lists the rights that each command needs"
    elif "the server doesn't have a resource type" in stderr:
        advice = "install modelswap's object definitions: kubectl apply -k crds/"
    return ClusterError(f"kubectl {arguments[0]}: {said}", advice=advice)
