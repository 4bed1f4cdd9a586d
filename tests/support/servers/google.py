"""fake-gcs-server on loopback: Google Cloud Storage's XML API, as far as `hack/servers/fake-gcs-server` completes it.

Requests carry the JWTs that the client signs for itself with the key of a service account; the server checks the
signature alone. Google's workload identity and what the cloud grants to whom do not exist here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.free_ports import free_port
from tests.support.servers.faults import Answer
from tests.support.servers.listening import listening
from tests.support.servers.stores import ask
from tests.support.tools import source_server


class GoogleServer:
    """One server, its data in memory; see :class:`tests.support.servers.stores.ObjectServer`."""

    scheme = "gs"
    expired = Answer(401)

    def __init__(self, home: Path) -> None:
        """Start it; the service account's public key lies below `home`."""
        account = _key()
        self._pem, self._other = _pem(account), _pem(_key())
        self.secret = self._pem.splitlines()[1]
        public = account.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (home / "account.pem").write_bytes(public)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = (
            str(source_server("fake-gcs-server")), "-listen", f"127.0.0.1:{port}", "-account", str(home / "account.pem")
        )  # fmt: skip
        self._child = listening("fake-gcs-server", command, port=port, home=home)

    def bucket(self, name: str) -> str:
        """Make a bucket, and return its name."""
        body = json.dumps({"name": name}).encode()
        ask(self.url, "POST", "/storage/v1/b", body=body, headers={"Content-Type": "application/json"})
        return name

    def settings(self, endpoint: str, *, mistaken: bool = False) -> Mapping[str, str]:
        """Return the keys of a Secret: the JSON of a service account, which names the server too."""
        account = {
            "type": "service_account",
            "client_email": "tester@models.iam.gserviceaccount.com",
            "private_key_id": "1",
            "private_key": self._other if mistaken else self._pem,
            "gcs_base_url": endpoint,
        }
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "GOOGLE_ALLOW_HTTP": "true"}

    def close(self) -> None:
        """Stop it."""
        self._child.stop()


def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _pem(key: rsa.RSAPrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
