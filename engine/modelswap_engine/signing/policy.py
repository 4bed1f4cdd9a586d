"""Whether a version must be signed here: the engine's own policy and the version's, of which the stricter one holds."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from modelswap_engine.checkpoint.layout import Evidence
from modelswap_engine.protocol.errors import SignatureInvalid
from modelswap_engine.protocol.policy import Verification
from modelswap_engine.signing.trust import named, read_trusted
from modelswap_engine.signing.verify import unsigned, verify


def _now() -> datetime:
    return datetime.now(UTC)


def stricter(one: Verification | None, other: Verification | None, *, what: str) -> Verification | None:
    """Return the policy of something that two policies hold for: all that either asks.

    Raises:
        SignatureInvalid: both name keys, and none of them is the same; ``what`` can be signed by nobody.
    """
    if one is None or other is None or one == other:
        return one or other
    keys = tuple(key for key in one.keys or other.keys if not other.keys or key in other.keys)
    if not keys and (one.keys or other.keys):
        raise SignatureInvalid(
            f"{what}: its own policy names the keys {', '.join(one.keys)}, its base's {', '.join(other.keys)}",
            advice="name a key that both allow, or none to leave it to the base's policy",
        )
    return Verification(required=one.required or other.required, keys=keys)


class Signatures:
    """What this engine asks of versions.

    Args:
        required: nothing is taken that is not signed, whatever a version says.
        trusted: folder of trusted keys; it is read each time, for mounted keys change.
        now: what certificates must be valid at.
    """

    def __init__(
        self, *, required: bool = False, trusted: Path | None = None, now: Callable[[], datetime] = _now
    ) -> None:
        self._required = required
        self._trusted = trusted
        self._now = now

    def wanted(self, verification: Verification | None) -> bool:
        """Say whether a version of this policy must be signed."""
        return self._required or (verification is not None and verification.required)

    def check(self, evidence: Evidence | None, verification: Verification | None) -> str:
        """Return who vouches for a version, "" where nobody needs to. It blocks.

        Args:
            evidence: what the version came with.
            verification: its own policy.

        Raises:
            SignatureMissing, SignatureInvalid: it may not be taken.
            TrustedKeysUnusable: a key is not mounted, or nothing can be verified here.
        """
        if not self.wanted(verification):
            return ""
        if evidence is None:
            raise unsigned()
        trusted = read_trusted([self._trusted] if self._trusted is not None else [])
        keys = verification.keys if verification is not None else ()
        return str(verify(evidence, trusted=named(trusted, keys), now=self._now()))
