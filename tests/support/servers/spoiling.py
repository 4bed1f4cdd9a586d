"""A wrong answer, made of the right one.

The request is never changed for it: where requests are signed, the range and the conditions may be signed too.
Refuses to know how an answer is sent.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from aiohttp import web

from tests.support.servers.faults import Dripping, Fault, OtherTag, WholeBody, WrongRange

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_INVERTED = bytes(255 - value for value in range(256))


def spoiled(response: web.StreamResponse, body: AsyncIterator[bytes], fault: Fault | None) -> AsyncIterator[bytes]:
    """Change the head of an answer that was not sent yet as a fault wants it, and return the body that follows."""
    if isinstance(fault, OtherTag):
        response.headers["ETag"] = fault.etag
    if isinstance(fault, Dripping):
        return _cut(body, fault.piece)
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        return body
    first, last, total = map(int, match.groups())
    if isinstance(fault, WrongRange):
        if fault.admitted:
            response.headers["Content-Range"] = f"bytes {first + fault.shift}-{last + fault.shift}/{total}"
        return _other(body)
    if isinstance(fault, WholeBody):
        response.set_status(200)
        del response.headers["Content-Range"]
        response.headers["Content-Length"] = str(total)
        return _between(bytes(first), body, bytes(total - last - 1))
    return body


async def _cut(body: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    async for data in body:
        for at in range(0, len(data), size):
            yield data[at : at + size]


async def _other(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for data in body:
        yield data.translate(_INVERTED)


async def _between(before: bytes, body: AsyncIterator[bytes], after: bytes) -> AsyncIterator[bytes]:
    yield before
    async for data in body:
        yield data
    yield after
