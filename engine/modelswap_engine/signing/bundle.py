"""The file that holds a signature, read as hostile input: of which kind it is, before anything is computed with it."""

import base64
import binascii
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from modelswap_engine.checkpoint import strict_json
from modelswap_engine.checkpoint.layout import MAX_SIGNATURE_BYTES, SIGNATURE_FILE
from modelswap_engine.protocol.errors import InvalidCheckpoint, SignatureInvalid

MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"


class Kind(StrEnum):
    """How a signer is known."""

    KEY = "key"
    CERTIFICATE = "certificate"


class _PublicKey(msgspec.Struct):
    hint: str


class _Certificate(msgspec.Struct, rename="camel"):
    raw_bytes: str


class _Chain(msgspec.Struct):
    certificates: Annotated[list[_Certificate], msgspec.Meta(min_length=1, max_length=16)]


class _Material(msgspec.Struct, rename="camel"):
    public_key: _PublicKey | None = None
    x509_certificate_chain: _Chain | None = msgspec.field(default=None, name="x509CertificateChain")
    certificate: _Certificate | None = None


class _Bundle(msgspec.Struct, rename="camel"):
    media_type: str
    verification_material: _Material


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What a signature says of its signer; none of it is proved.

    ``hint`` is the hash of the public key, ``certificate`` the signer's own (DER).
    """

    kind: Kind
    hint: str = ""
    certificate: bytes = b""


def read_bundle(data: bytes) -> Bundle:
    """Read a signature.

    Raises:
        SignatureInvalid: not a bundle of a kind that can be held against a key or a certificate.
    """
    if len(data) > MAX_SIGNATURE_BYTES:
        raise refusal(f"larger than {MAX_SIGNATURE_BYTES} bytes")
    try:
        # No duplicate keys: what is looked at here must be what is verified later.
        material = msgspec.convert(strict_json.loads(data, file=SIGNATURE_FILE), _Bundle)
    except (InvalidCheckpoint, msgspec.ValidationError) as error:
        raise refusal(f"not a bundle of model signing: {error}") from None
    if material.media_type != MEDIA_TYPE:
        raise refusal("a bundle of another version")
    return _kind(material.verification_material)


def refusal(message: str, *, advice: str = "") -> SignatureInvalid:
    """Return the error that names the file."""
    return SignatureInvalid(
        f"{SIGNATURE_FILE}: {message}",
        advice=advice or "sign the manifest anew: modelswap manifest sign DIR --key KEY",
        details={"file": SIGNATURE_FILE},
    )


def _kind(material: _Material) -> Bundle:
    key, chain = material.public_key, material.x509_certificate_chain
    if key is not None and chain is None and material.certificate is None and key.hint:
        return Bundle(kind=Kind.KEY, hint=key.hint)
    if chain is not None and key is None and material.certificate is None:
        try:
            der = base64.b64decode(chain.certificates[0].raw_bytes, validate=True)
        except binascii.Error:
            raise refusal("its certificate is not base64") from None
        return Bundle(kind=Kind.CERTIFICATE, certificate=der)
    if material.certificate is not None:
        raise refusal(
            "a keyless signature, which cannot be verified without asking others",
            advice="verify it where you publish, and sign there with a key or a certificate (docs/guides/signing.md)",
        )
    raise refusal("it names neither a key nor a certificate")
