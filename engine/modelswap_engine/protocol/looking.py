"""Looking at a source again: does it still hold, under its name, what was resolved?

No tensors of a base are read for it; an adapter, which is small, is read when its files are others than before.
"""

import re
from typing import Final

from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.wire import Message

_FIXED: Final = re.compile(r"hf://[^@]+@[0-9a-f]{40}(/.*)?|oci://.*@sha256:[0-9a-f]{64}", re.ASCII)


class LookRequest(Message, frozen=True, kw_only=True):
    """``POST /look``: look at the source of ``target``, which is live.

    ``POST /adapters/look``: look at that of the adapter that is called as ``target`` calls its version. It is read and
    hashed, unless its files are those of ``known``, the revision of a look that found ``target`` there.
    """

    target: VersionRef
    known: str = ""


class SourceLook(Message, frozen=True, kw_only=True):
    """What was seen; a source that cannot be asked is an error and no answer.

    Attributes:
        found: the digest of another content, or the files that are others; "" where it is the same.
        revision: one name for the files that are there, the same from each pod that sees them; "" where there is none.
    """

    found: str = ""
    revision: str = ""


def proven(found: str) -> bool:
    """Say whether another content was found, and not only files that are others and may hold the same tensors."""
    return found.startswith("sha256:")


def fixed(uri: str) -> bool:
    """Say whether a URI names its content itself, by a commit or a digest, so that it cannot come to hold another."""
    return _FIXED.fullmatch(uri) is not None
