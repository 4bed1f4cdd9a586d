"""Keys and certificates that manifests are signed with in tests."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = datetime.now(UTC)
DAY = timedelta(days=1)
CODE_SIGNING, SERVER = ExtendedKeyUsageOID.CODE_SIGNING, ExtendedKeyUsageOID.SERVER_AUTH


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """Files of a key; ``public`` is what verifiers trust."""

    private: Path
    public: Path


def write_key(folder: Path, name: str = "release", curve: ec.EllipticCurve | None = None) -> KeyPair:
    """Make a key."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(curve or ec.SECP256R1())
    pair = KeyPair(private=folder / f"{name}.pem", public=folder / f"{name}.pub")
    pair.private.write_bytes(_private(key))
    pair.public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return pair


class Authority:
    """A certificate authority of a test.

    Args:
        folder: where its files lie.
        name: its common name.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._name, self._name, self._key, NOW - 400 * DAY, NOW + 400 * DAY)
        ca = x509.BasicConstraints(ca=True, path_length=None)
        certificate = builder.add_extension(ca, critical=True).sign(self._key, hashes.SHA256())
        self.certificate = folder / f"{name}.crt"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        use: x509.ObjectIdentifier | None = CODE_SIGNING,
        valid: tuple[datetime, datetime] = (NOW - DAY, NOW + DAY),
    ) -> tuple[Path, Path]:
        """Return the key and the certificate of a signer."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = _builder(_name(name), self._name, key, *valid).add_extension(usage, critical=True)
        if use is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        files = self._folder / f"{name}.key", self._folder / f"{name}.crt"
        files[0].write_bytes(_private(key))
        files[1].write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return files


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)
