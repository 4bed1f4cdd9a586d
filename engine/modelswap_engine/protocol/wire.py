"""The base of everything that travels over the control port, camelCase on the wire.

Byte counts are integers in bytes, durations floats in seconds unless the name says microseconds, times are
RFC 3339 strings in UTC, digests are ``sha256:<64 hex>``. Fields are only ever added; unknown ones are ignored.
"""

from typing import Final

import msgspec

LONGEST_ID: Final = 256
"""Characters of an operation's or a lease's id."""


class Message(msgspec.Struct, rename="camel", omit_defaults=False, kw_only=True, frozen=True):
    """Base of all wire types."""
