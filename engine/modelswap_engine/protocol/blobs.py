"""What pods of a slot ask each other for: bytes by their hash, and manifests by their digest.

``GET /blobs/sha256/{hash}`` and ``GET /blobs/manifests/{digest}`` answer bytes; ``POST /blobs/held`` says which of the
blobs that it names are there. Nothing lists what a pod has.
"""

from typing import Annotated, Final

import msgspec

from modelswap_engine.protocol.version import CONTROL_PREFIX
from modelswap_engine.protocol.wire import Message

BLOBS: Final = f"{CONTROL_PREFIX}/blobs"
MOST_HASHES: Final = 10_000
"""Of one question; more are asked in several."""

Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class HeldRequest(Message, frozen=True, kw_only=True):
    """``POST /blobs/held``: which of these are there, complete?"""

    sha256: Annotated[list[Hash], msgspec.Meta(max_length=MOST_HASHES)]


class Held(Message, frozen=True, kw_only=True):
    """Those of the question that are there."""

    sha256: list[str] = []
