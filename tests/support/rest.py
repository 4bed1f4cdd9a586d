"""Plain HTTP to an API server, as its administrator or as another user: what kubectl would do, without a process.

Refuses to know any kind of object.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.support.apiserver import ApiServer

APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of an answer; of a refusal, `message` is what kubectl shows."""

    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        """Return why the server refused."""
        return str(self.body.get("message", ""))

    def accepted(self) -> dict[str, Any]:
        """Return the object; raise with the server's words if it refused."""
        if self.status >= 300:
            raise RuntimeError(self.message or f"status {self.status}")
        return self.body


class Rest:
    """One kept connection to one server."""

    def __init__(self, server: ApiServer, *, user: str = "") -> None:
        kubeconfig = server.kubeconfig_of(user) if user else server.kubeconfig
        mine = json.loads(kubeconfig.read_text())["users"][0]["user"]
        context = ssl.create_default_context(cafile=str(server.ca))
        with tempfile.NamedTemporaryFile() as pem:
            for part in ("client-key-data", "client-certificate-data"):
                pem.write(base64.b64decode(mine[part]) + b"\n")
            pem.flush()
            context.load_cert_chain(pem.name)
        address = urlsplit(server.url)
        self._connection = http.client.HTTPSConnection(str(address.hostname), address.port, context=context, timeout=60)

    def reconnect(self) -> None:
        """Connect anew with the next call: the server was started again."""
        self._connection.close()

    def call(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Answer:
        """Make one call."""
        payload = None if body is None else json.dumps(body)
        self._connection.request(method, path, payload, {"Content-Type": content, "Accept": "application/json"})
        answer = self._connection.getresponse()
        return Answer(answer.status, json.loads(answer.read()))
