"""Holding a signature against a manifest and the trusted keys.

The mathematics and the format are upstream's (``model_signing``), which works on files: it is given the very bytes in
a folder of their own. On top of it: the signer must be one of the trusted, by fingerprint; a certificate must be valid
now (upstream asks whether it was when its life began) and, where it says what it is for, for signing code.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelswap_engine.checkpoint.layout import SIGNATURE_FILE, Evidence
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import SignatureInvalid, SignatureMissing, TrustedKeysUnusable
from modelswap_engine.signing.bundle import Bundle, Kind, read_bundle, refusal
from modelswap_engine.signing.trust import Trusted

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


@dataclass(frozen=True, kw_only=True)
class Signer:
    """Who signed: the file name of the trusted key, or the subject of the certificate, and its SHA-256."""

    kind: Kind
    name: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} (sha256:{self.fingerprint[:16]})"


def unsigned() -> SignatureMissing:
    """Return the error for a version that came with nothing to verify."""
    return SignatureMissing(
        f"it has no {MANIFEST_FILE} with a {SIGNATURE_FILE} beside it, and only signed versions are taken",
        advice="sign it where it is published: modelswap manifest build DIR --sign KEY (or manifest sign)",
        details={"file": SIGNATURE_FILE},
    )


def verify(evidence: Evidence, *, trusted: Sequence[Trusted], now: datetime) -> Signer:
    """Return who signed a manifest.

    Args:
        evidence: the manifest, and what lies beside it.
        trusted: who may have signed it.
        now: what certificates must be valid at.

    Raises:
        SignatureInvalid: refused.
        TrustedKeysUnusable: a trusted file cannot be read, or the package for signatures is not installed.
    """
    bundle = read_bundle(evidence.signature)
    try:
        if bundle.kind is Kind.KEY:
            return _by_key(bundle, evidence, trusted)
        return _by_certificate(bundle, evidence, trusted, now)
    except ModuleNotFoundError as error:
        raise TrustedKeysUnusable(
            f"signatures cannot be verified: the package {error.name} is not installed",
            advice="pip install 'modelswap[signing]', or use an image that has it",
        ) from None


def _by_key(bundle: Bundle, evidence: Evidence, trusted: Sequence[Trusted]) -> Signer:
    from model_signing import verifying

    for item in trusted:
        for pem in item.keys:
            if fingerprint(pem, name=item.name) == bundle.hint:

                def configure(file: Path) -> Any:
                    return verifying.Config().use_elliptic_key_verifier(public_key=file)

                _upstream(configure, pem, evidence)
                return Signer(kind=Kind.KEY, name=item.name, fingerprint=bundle.hint)
    raise _untrusted(f"signed by the key {shown(bundle.hint, 16)}", trusted)


def _by_certificate(bundle: Bundle, evidence: Evidence, trusted: Sequence[Trusted], now: datetime) -> Signer:
    from cryptography import x509
    from model_signing import verifying

    roots = b"".join(pem for item in trusted for pem in item.certificates)
    try:
        certificate = x509.load_der_x509_certificate(bundle.certificate)
        subject = shown(certificate.subject.rfc4514_string(), 200)
    except ValueError:
        raise refusal("its certificate cannot be read") from None
    if not roots:
        raise _untrusted(f"signed with a certificate of {subject!r}", trusted)

    def configure(file: Path) -> Any:
        return verifying.Config().use_certificate_verifier(certificate_chain=[file])

    _upstream(configure, roots, evidence)
    _check_certificate(certificate, subject, now)
    return Signer(kind=Kind.CERTIFICATE, name=subject, fingerprint=sha256(bundle.certificate).hexdigest())


def fingerprint(pem: bytes, *, name: str) -> str:
    """Return the hash by which a signature names a public key.

    Raises:
        TrustedKeysUnusable: not a key that signatures can be made with.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(pem)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("not an elliptic curve key")
    except ValueError as error:
        raise TrustedKeysUnusable(f"{name}: {error}", advice="trust keys on the curves P-256, P-384 or P-521") from None
    spki = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return sha256(spki).hexdigest()


def _upstream(configure: Any, trusted: bytes, evidence: Evidence) -> None:
    with tempfile.TemporaryDirectory(prefix="modelswap-signature-") as place:
        folder = Path(place)
        (folder / MANIFEST_FILE).write_bytes(evidence.manifest)
        (folder / SIGNATURE_FILE).write_bytes(evidence.signature)
        (folder / "trusted.pem").write_bytes(trusted)
        try:
            configure(folder / "trusted.pem").verify(folder / MANIFEST_FILE, folder / SIGNATURE_FILE)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # noqa: BLE001 - a hostile bundle makes upstream raise anything
            raise refusal(_cause(error)) from None


def _cause(error: Exception) -> str:
    text = str(error)
    if text.startswith("Signature mismatch"):
        return "it is the signature of another manifest, or the manifest was changed since"
    if "certificate" in text.lower():
        return f"its certificate is not trusted here: {shown(text, 160)}"
    return f"it does not hold: {shown(text, 160) or type(error).__name__}"


def _check_certificate(certificate: "Certificate", subject: str, now: datetime) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise refusal(
            f"the certificate of {subject!r} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d} only",
            advice="sign the manifest anew with a certificate that is valid as long as the version is to be loaded",
        )
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if ExtendedKeyUsageOID.CODE_SIGNING not in uses:  # a server's certificate of the same authority is no signer
        raise refusal(f"the certificate of {subject!r} is not for signing code")


def _untrusted(what: str, trusted: Sequence[Trusted]) -> SignatureInvalid:
    names = ", ".join(item.name for item in trusted)
    return refusal(
        f"{what}, which is not among the trusted ones ({names or 'none'})",
        advice="sign with a trusted key, or mount this one's public key where engines take their trusted keys from",
    )
