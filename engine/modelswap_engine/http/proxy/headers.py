"""Which headers pass a proxy, in which direction. Pure.

What is about one connection stays on it; what tells the engine how to encode an answer is ours to say, because answers
are renamed as they stream by.
"""

from typing import Final

from multidict import CIMultiDict, MultiMapping

_HOP_BY_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_NOT_SENT: Final = _HOP_BY_HOP | frozenset(
    {"host", "content-length", "content-encoding", "accept-encoding", "expect", "x-request-id", "content-type"}
)
_NOT_ANSWERED: Final = _HOP_BY_HOP | frozenset({"content-length", "date", "server", "x-request-id"})
_OURS: Final = "x-modelswap-"
_NEVER_SENT: Final = (_OURS, "x-data-parallel-", "x-session-")
"""By the last two a client would choose a replica or a session in the engine."""


def to_engine(headers: MultiMapping[str], *, request_id: str) -> list[tuple[str, str]]:
    """Return what of a client's headers the engine gets."""
    kept = _passing(headers, _NOT_SENT, prefixes=_NEVER_SENT)
    kept += (("Accept-Encoding", "identity"), ("Content-Type", "application/json"), ("X-Request-Id", request_id))
    return kept


def to_client(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """Return what of the engine's headers a client gets."""
    return CIMultiDict(_passing(headers, _NOT_ANSWERED, prefixes=_OURS))


def _passing(
    headers: MultiMapping[str], stopped: frozenset[str], *, prefixes: str | tuple[str, ...]
) -> list[tuple[str, str]]:
    if "Connection" in headers:
        named = ",".join(headers.getall("Connection")).split(",")
        stopped |= {token.strip().lower() for token in named}
    return [
        (key, value)
        for key, value in headers.items()
        if (name := key.lower()) not in stopped and not name.startswith(prefixes)
    ]
