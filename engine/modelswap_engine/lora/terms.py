"""On which terms an adapter is taken: who must vouch for it.

Only what is on terms is opened, registered or staged, and nothing else makes that of a source, so no way to load an
adapter can forget to ask for a signature. Knows no keys.
"""

import msgspec

from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.errors import NotReady
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.signing.policy import stricter


class OnTerms(AdapterSource, frozen=True, kw_only=True):
    """A source whose ``verification`` is what holds for it."""


def asked(source: AdapterSource, base: VersionRef | None) -> OnTerms:
    """Return a source that a call names: beside a base that had to be signed it can ask for more, never for less.

    Raises:
        NotReady: there is no base that could say.
        SignatureInvalid: no key could do for both.
    """
    if base is None:
        raise NotReady("no base is live yet", advice="try again when the engine is ready")
    policy = stricter(source.verification, base.verification, what=f"adapter {source.name}")
    return settled(msgspec.structs.replace(source, verification=policy))


def settled(source: AdapterSource) -> OnTerms:
    """Return a source whose terms were settled before: by the slot's object, or when it was taken."""
    return OnTerms(**msgspec.structs.asdict(source))
