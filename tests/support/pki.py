"""Keys, certificates and kubeconfigs of a throwaway API server.

Refuses to know how the server is started.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa


@dataclass(frozen=True, slots=True)
class Pki:
    """Paths of what an API server needs, and the authority that signs its users."""

    ca: Path
    server_certificate: Path
    server_key: Path
    account_key: Path
    account_public_key: Path
    authority: trustme.CA

    def write_kubeconfig(self, path: Path, *, server: str, user: str, group: str | None = None) -> None:
        """Write a kubeconfig (as JSON, which is YAML) for `user`, a member of `group`."""
        # Any name will do as the alternative one, but there must be one: an empty list is refused by Go's verifier.
        issued = self.authority.issue_cert("client.invalid", common_name=user, organization_name=group)
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bare",
            "clusters": [
                {
                    "name": "bare",
                    "cluster": {"server": server, "certificate-authority-data": _text(self.ca.read_bytes())},
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": _text(chain),
                        "client-key-data": _text(issued.private_key_pem.bytes()),
                    },
                }
            ],
            "contexts": [{"name": "bare", "context": {"cluster": "bare", "user": user}}],
        }
        path.write_text(json.dumps(config))
        path.chmod(0o600)


def make_pki(folder: Path) -> Pki:
    """Make a new authority, the server's certificate for loopback, and the key that signs service-account tokens."""
    folder.mkdir(parents=True)
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost", "kubernetes.default.svc", common_name="kube-apiserver")
    account = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pki = Pki(
        ca=folder / "ca.crt",
        server_certificate=folder / "apiserver.crt",
        server_key=folder / "apiserver.key",
        account_key=folder / "accounts.key",
        account_public_key=folder / "accounts.pub",
        authority=authority,
    )
    authority.cert_pem.write_to_path(pki.ca)
    pki.server_certificate.write_bytes(b"".join(pem.bytes() for pem in server.cert_chain_pems))
    server.private_key_pem.write_to_path(pki.server_key)
    pki.account_key.write_bytes(
        account.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    pki.account_public_key.write_bytes(
        account.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return pki


class Files(NamedTuple):
    """A certificate and its key, as a Secret's volume has them."""

    certificate: Path
    key: Path


def write_pair(
    authority: trustme.CA, folder: Path, name: str, *, begins: datetime | None = None, ends: datetime | None = None
) -> Files:
    """Write a certificate for a name and its key, each in place of the one before at once."""
    issued = authority.issue_cert(name, not_before=begins, not_after=ends)
    files = Files(folder / "tls.crt", folder / "tls.key")
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    for path, content in zip(files, (chain, issued.private_key_pem.bytes()), strict=True):
        put(path, content)
    return files


def put(path: Path, content: bytes) -> None:
    """Write a file in place of the one before at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(path)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
