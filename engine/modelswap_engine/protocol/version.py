"""Protocol version negotiation.

Pods outlive many operators: an operator must keep talking to sidecars two releases back, so unknown fields
are ignored on both sides and the version only says what may be asked for.
"""

from typing import Final

PROTOCOL_VERSION: Final = 3
OLDEST_SUPPORTED: Final = 1
HOLDS_SINCE: Final = 2
"""The first version whose swaps can be asked to wait once they have staged (`holding`)."""
VERIFIES_SINCE: Final = 3
"""The first version that refuses versions and adapters that are not signed when it is told to; older ones would not
notice."""
FETCHES_AHEAD_SINCE: Final = 3
"""The first version that fetches versions ahead of their time (`prefetch`)."""
LOOKS_SINCE: Final = 3
"""The first version that looks again at the source of what is live (`looking`)."""
CONTROL_PREFIX: Final = "/modelswap/v1"


def supported(version: int) -> bool:
    """Say whether this side can talk to a peer that announces ``version``."""
    return version >= OLDEST_SUPPORTED
