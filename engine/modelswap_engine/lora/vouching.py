"""Who vouches for an adapter: its signed manifest, of which its config, its header and its tensors must be.

Only asked where policy says so; knows neither keys nor signatures, and no place.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.lora.terms import OnTerms
from modelswap_engine.protocol.errors import ManifestMismatch, SignatureInvalid, SignatureMissing
from modelswap_engine.protocol.policy import Verification
from modelswap_engine.signing.policy import Signatures
from modelswap_engine.signing.verify import unsigned
from modelswap_engine.sources.adapter import read_manifest
from modelswap_engine.sources.port import OpenedAdapter

Offload = Callable[..., Awaitable[Any]]


class Vouching:
    """What this engine asks of adapters.

    Args:
        signatures: the policy, the same as for versions.
        offload: runs what blocks.
    """

    def __init__(self, signatures: Signatures | None = None, *, offload: Offload = asyncio.to_thread) -> None:
        self._signatures = signatures or Signatures()
        self._offload = offload

    async def manifest_of(self, opened: OpenedAdapter, source: OnTerms) -> Manifest | None:
        """Return the signed manifest of an adapter that fits its headers; None where none is asked for.

        Raises:
            SignatureMissing, SignatureInvalid, TrustedKeysUnusable: it may not be taken.
            ManifestMismatch, InvalidCheckpoint: what is signed is another adapter.
        """
        if not self._signatures.wanted(source.verification):
            return None
        try:
            found: Manifest = await self._offload(self._read, opened, source.verification)
        except (SignatureMissing, SignatureInvalid, ManifestMismatch) as error:
            message = f"adapter {source.name} at {source.uri}: {error.message}"
            raise type(error)(message, advice=error.advice, details=error.details) from None
        return found

    def _read(self, opened: OpenedAdapter, verification: Verification | None) -> Manifest:
        evidence = opened.evidence
        if evidence is None:
            raise unsigned()
        self._signatures.check(evidence, verification)
        return read_manifest(evidence.manifest, config=opened.config, tensors=opened.tensors)


def check_hashes(manifest: Manifest, hashes: Mapping[str, str]) -> None:
    """Hold the bytes of an adapter's tensors (name → sha256) against the manifest that was signed.

    Raises:
        ManifestMismatch: they are others.
    """
    for name, sha256 in sorted(hashes.items()):
        if manifest.by_name[name].sha256 != sha256:
            raise ManifestMismatch(
                f"{MANIFEST_FILE}: the bytes of tensor {name!r} are not those that it lists",
                advice="put the signed adapter back, or build and sign its manifest again",
                details={"tensor": name, "expected": manifest.by_name[name].sha256, "actual": sha256},
            )
