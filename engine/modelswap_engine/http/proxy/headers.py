"""Which headers pass a proxy, in which direction. Pure.

What is about one connection stays on it; what tells the engine how to encode an answer is ours to say, because answers
are renamed as they stream by.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from multidict import CIMultiDict

_HOP_BY_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_OURS_TO_SEND: Final = frozenset(
    {"host", "content-length", "content-encoding", "accept-encoding", "expect", "x-request-id", "content-type"}
)
_OURS_TO_ANSWER: Final = frozenset({"content-length", "date", "server", "x-request-id"})
_OURS: Final = "x-modelswap-"
_ENGINE: Final = ("x-data-parallel-", "x-session-")
"""By these a client would choose a replica or a session in the engine."""


def to_engine(headers: Mapping[str, str], *, request_id: str) -> CIMultiDict[str]:
    """Return what of a client's headers the engine gets."""
    kept = _passing(headers, _OURS_TO_SEND, prefixes=(_OURS, *_ENGINE))
    kept["Accept-Encoding"] = "identity"
    kept["Content-Type"] = "application/json"
    kept["X-Request-Id"] = request_id
    return kept


def to_client(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return what of the engine's headers a client gets."""
    return _passing(headers, _OURS_TO_ANSWER, prefixes=(_OURS,))


def _passing(headers: Mapping[str, str], kept_back: frozenset[str], *, prefixes: tuple[str, ...]) -> CIMultiDict[str]:
    named = frozenset(_tokens(value for key, value in headers.items() if key.lower() == "connection"))
    stopped = _HOP_BY_HOP | kept_back | named
    passing: CIMultiDict[str] = CIMultiDict()
    for key, value in headers.items():
        name = key.lower()
        if name not in stopped and not name.startswith(prefixes):
            passing.add(key, value)
    return passing


def _tokens(values: Iterable[str]) -> list[str]:
    return [token.strip().lower() for value in values for token in value.split(",")]
