"""Service-account tokens as a cluster would sign them, and as an attacker would forge them; no cluster needed."""

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

ISSUER = "https://kubernetes.default.svc.cluster.local"
SUBJECT = "system:serviceaccount:modelswap:operator"
POD_UID = "6f1c0b0e-7d0c-4a52-9f43-0d6a7b1f8f11"
NOW = 1_800_000_000.0


@dataclass
class Signer:
    """One signing key of a cluster."""

    kid: str
    algorithm: str = "RS256"
    key: Any = field(init=False)

    def __post_init__(self) -> None:
        if self.algorithm == "RS256":
            self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        else:
            self.key = ec.generate_private_key(ec.SECP256R1())

    def jwk(self) -> dict[str, Any]:
        """Return the public half as it stands in the cluster's key set."""
        kind = jwt.algorithms.RSAAlgorithm if self.algorithm == "RS256" else jwt.algorithms.ECAlgorithm
        public: dict[str, Any] = json.loads(kind.to_jwk(self.key.public_key()))
        return {**public, "kid": self.kid, "use": "sig", "alg": self.algorithm}

    def public_pem(self) -> bytes:
        """Return the public key as text, the "secret" of an algorithm confusion."""
        return self.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def sign(self, claims: dict[str, Any], **header: Any) -> str:
        """Sign claims honestly; ``header`` adds to or (with None) removes from the token's header."""
        headers = {"kid": self.kid, **header}
        return jwt.encode(
            claims,
            self.key,
            algorithm=self.algorithm,
            headers={key: value for key, value in headers.items() if value is not None},
        )


def claims(**changes: Any) -> dict[str, Any]:
    """Return what the operator's token says; None removes a claim."""
    base = {
        "iss": ISSUER,
        "sub": SUBJECT,
        "aud": [POD_UID],
        "iat": int(NOW) - 5,
        "nbf": int(NOW) - 5,
        "exp": int(NOW) + 600,
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def key_set(*signers: Signer) -> bytes:
    """Return the cluster's key set."""
    return json.dumps({"keys": [signer.jwk() for signer in signers]}).encode()


def _part(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def forged(header: dict[str, Any], body: Any, *, secret: bytes | None = None) -> str:
    """Return a token with any header; signed with HMAC over ``secret``, or not at all."""
    text = f"{_part(header)}.{_part(body)}"
    signature = b"" if secret is None else hmac.new(secret, text.encode(), hashlib.sha256).digest()
    return f"{text}.{_part(signature)}"
