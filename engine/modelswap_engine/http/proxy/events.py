"""Server-sent events on their way through: only whole ones go on, so that an error can follow any of them. Pure."""

from typing import Final

_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LONGEST_END: Final = max(map(len, _ENDS))
LARGEST_EVENT: Final = 1 << 20
"""Bytes of an event that are held back while it is not whole; a larger one goes on in pieces."""


class Cutter:
    """Cuts what comes at the ends of events."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """Take the next piece, and return all that is whole by now."""
        if not self._held and piece.endswith(_ENDS):
            return piece
        looked_at = max(0, len(self._held) - _LONGEST_END + 1)
        self._held += piece
        found = [(self._held.rfind(mark, looked_at), len(mark)) for mark in _ENDS]
        end = max(place + size if place >= 0 else 0 for place, size in found)
        if not end and len(self._held) > LARGEST_EVENT:
            end = len(self._held)
        whole = bytes(self._held[:end])
        del self._held[:end]
        return whole

    def finish(self) -> bytes:
        """Return what came after the last whole event."""
        held, self._held = self._held, bytearray()
        return bytes(held)
