"""Signing a manifest: with a key, or with a key and the certificates that say whose it is."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from modelswap_engine.checkpoint.layout import SIGNATURE_FILE
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import BadRequest


def sign(manifest: bytes, *, key: Path, certificate: Path | None = None, chain: Sequence[Path] = ()) -> bytes:
    """Return what belongs beside a manifest as ``modelswap.manifest.json.sig``.

    The signature is one of a model that is this single file, so that upstream's own tool verifies it, too.

    Args:
        manifest: its bytes.
        key: private key (PEM) on P-256, P-384 or P-521.
        certificate: certificate of the key (PEM), where verifiers trust authorities instead of keys.
        chain: certificates between it and the authority.

    Raises:
        BadRequest: the key or a certificate cannot be used.
        ModuleNotFoundError: the package for signatures is not installed.
    """
    from model_signing import signing

    with tempfile.TemporaryDirectory(prefix="modelswap-sign-") as place:
        file, signature = Path(place, MANIFEST_FILE), Path(place, SIGNATURE_FILE)
        file.write_bytes(manifest)
        config = signing.Config()
        try:
            if certificate is None:
                config.use_elliptic_key_signer(private_key=key)
            else:
                # Upstream takes no empty chain; a certificate twice in one does no harm.
                config.use_certificate_signer(
                    private_key=key, signing_certificate=certificate, certificate_chain=chain or [certificate]
                )
            config.sign(file, signature)
        except (OSError, ValueError, TypeError, AttributeError) as error:  # of upstream, by what is wrong with a file
            raise BadRequest(
                f"{certificate or key}: cannot sign with it: {shown(str(error), 160)}",
                advice="it takes a private key in PEM on P-256, P-384 or P-521, without a password "
                "(openssl pkey -in KEY | modelswap … /dev/stdin asks for one), and its certificate",
            ) from None
        return signature.read_bytes()
