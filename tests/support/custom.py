"""Objects of modelswap.dev for tests, and an API server that knows their definitions.

Refuses to know what is right: it builds what it is told to.
"""

from __future__ import annotations

import json
import time
from copy import deepcopy
from typing import Any

import pytest

from tests.support.apiserver import ApiServer
from tests.support.cache import REPOSITORY
from tests.support.rest import APPLY, Answer, Rest

GROUP_VERSION = "modelswap.dev/v1alpha1"
DEFINITIONS = ("modelversions.modelswap.dev", "loraadapters.modelswap.dev")
STRICT = "fieldValidation=Strict"
DIGEST = "sha256:" + "0123456789abcdef" * 4


def install_definitions(server: ApiServer) -> None:
    """Apply crds/ as a user does, and wait until the server serves the two kinds."""
    server.kubectl("apply", "--server-side", "--kustomize", str(REPOSITORY / "crds"))
    names = [f"crd/{name}" for name in DEFINITIONS]
    server.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
    # Discovery and what kubectl explain reads follow a moment later, and nothing can be waited for but they themselves.
    deadline = time.monotonic() + 60
    while server.try_kubectl("explain", "modelversions.status").returncode and time.monotonic() < deadline:
        time.sleep(0.1)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` over it; None takes a field out."""
    found = deepcopy(base)
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merged(found[key], value)
        else:
            found[key] = deepcopy(value)
    return found


def model_version(name: str = "slot", **spec: Any) -> dict[str, Any]:
    """Return the smallest ModelVersion, with fields of its spec changed."""
    smallest = {"servedModelName": "chat", "version": "1.0", "source": {"uri": "file:///models/chat-1.0"}}
    return {
        "apiVersion": GROUP_VERSION,
        "kind": "ModelVersion",
        "metadata": {"name": name},
        "spec": merged(smallest, spec),
    }


def lora_adapter(name: str = "adapter", **spec: Any) -> dict[str, Any]:
    """Return the smallest LoRAAdapter, with fields of its spec changed."""
    smallest = {"adapterName": "support", "modelRef": {"name": "slot"}, "sources": [{"uri": "file:///models/support"}]}
    return {
        "apiVersion": GROUP_VERSION,
        "kind": "LoRAAdapter",
        "metadata": {"name": name},
        "spec": merged(smallest, spec),
    }


class Namespace:
    """One namespace of an API server: objects go in, objects or refusals come out."""

    def __init__(self, server: ApiServer, rest: Rest, name: str) -> None:
        self.server = server
        self.name = name
        self._rest = rest
        rest.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}}).accepted()

    def create(self, thing: dict[str, Any]) -> dict[str, Any]:
        """Create an object and return it as stored."""
        return self._create(thing).accepted()

    def replace(self, thing: dict[str, Any]) -> dict[str, Any]:
        """Replace an object and return it as stored."""
        return self._replace(thing).accepted()

    def refused(self, thing: dict[str, Any]) -> str:
        """Try to create an object, or to replace one that exists; return why the server refused it."""
        answer = self._create(thing)
        if answer.status == 409:
            answer = self._replace(thing)
        if answer.status < 300:
            raise AssertionError(f"the server accepted {json.dumps(thing['spec'])}")
        return answer.message

    def apply(self, thing: dict[str, Any], *, manager: str, subresource: str = "") -> dict[str, Any]:
        """Apply an object by server-side apply, with force, and return it as stored."""
        path = f"{self._object(thing)}{subresource and '/' + subresource}?{STRICT}&fieldManager={manager}&force=true"
        return self._rest.call("PATCH", path, thing, content=APPLY).accepted()

    def table(self, kind: str, *arguments: str) -> list[str]:
        """Return the lines that `kubectl get` prints."""
        return self.server.kubectl("get", kind, "-n", self.name, *arguments).splitlines()

    def _create(self, thing: dict[str, Any]) -> Answer:
        return self._rest.call("POST", f"{self._list(thing)}?{STRICT}", thing)

    def _replace(self, thing: dict[str, Any]) -> Answer:
        seen = self._rest.call("GET", self._object(thing)).accepted()
        version = {"resourceVersion": seen["metadata"]["resourceVersion"]}
        return self._rest.call("PUT", f"{self._object(thing)}?{STRICT}", merged(thing, {"metadata": version}))

    def _list(self, thing: dict[str, Any]) -> str:
        return f"/apis/{GROUP_VERSION}/namespaces/{self.name}/{thing['kind'].lower()}s"

    def _object(self, thing: dict[str, Any]) -> str:
        return f"{self._list(thing)}/{thing['metadata']['name']}"


@pytest.fixture(scope="session")
def definitions(api_server: ApiServer) -> ApiServer:
    """The run's API server, which serves the two kinds."""
    install_definitions(api_server)
    return api_server


@pytest.fixture(scope="session")
def rest(api_server: ApiServer) -> Rest:
    """Plain HTTP to the run's API server."""
    return Rest(api_server)
