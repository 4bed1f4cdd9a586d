"""What a server, or what lies between it and a client, can do wrong with one answer, as data.

Refuses to know how an answer is sent: :mod:`tests.support.servers.proxy` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Truncated:
    """The connection is closed in order after some bytes of the body; the length promised more."""

    after: int


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection is reset (RST) after some bytes of the body, or before the head of the answer: -1."""

    after: int = -1


@dataclass(frozen=True, slots=True)
class Stalled:
    """Some bytes of the body come, and then nothing more, for as long as the client stays; -1: not even a head."""

    after: int = -1


@dataclass(frozen=True, slots=True)
class Dripping:
    """The body comes in small pieces with pauses between them."""

    piece: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WrongRange:
    """Status 206 and other bytes than asked for. Content-Range says so, or (not admitted) claims what was asked for."""

    shift: int = 1
    admitted: bool = True


@dataclass(frozen=True, slots=True)
class WholeBody:
    """The range asked for is ignored: as many bytes as the whole object has, with status 200."""


@dataclass(frozen=True, slots=True)
class OtherTag:
    """Another ETag than the server's: the object was replaced, and conditions (If-Match) are not looked at."""

    etag: str = '"replaced"'


@dataclass(frozen=True, slots=True)
class Answer:
    """The server is not asked: an answer of our own."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


Fault = Truncated | Reset | Stalled | Dripping | WrongRange | WholeBody | OtherTag | Answer


def throttled(status: int = 503, *, retry_after: str = "0") -> Answer:
    """Return the answer of a server that has too much to do."""
    return Answer(status, {"Retry-After": retry_after}, b"slow down")


def expired() -> Answer:
    """Return S3's answer to credentials whose time is over."""
    body = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>ExpiredToken</Code><Message>expired</Message></Error>'
    return Answer(400, {"Content-Type": "application/xml"}, body)


def forbidden() -> Answer:
    """Return S3's answer to who may not read."""
    body = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code><Message>no</Message></Error>'
    return Answer(403, {"Content-Type": "application/xml"}, body)


def redirected(location: str, *, status: int = 307) -> Answer:
    """Return an answer that sends the client elsewhere."""
    return Answer(status, {"Location": location})


@dataclass(slots=True)
class Rule:
    """Which requests meet a fault: a method and a path, after the first few of them, and how often."""

    fault: Fault
    method: str
    path: re.Pattern[str]
    skip: int
    times: int | None

    def takes(self, method: str, path: str) -> bool:
        """Say whether a request meets the fault, and count it."""
        if method != self.method or not self.path.search(path) or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True
