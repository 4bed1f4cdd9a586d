"""Reading request bodies within bounds of size and time, and answering messages as JSON."""

import asyncio
from typing import TypeVar

from aiohttp import web

from modelswap_engine.http.errors import TooLarge, TooSlow
from modelswap_engine.protocol.codec import decode, encode

T = TypeVar("T")

BODY_SECONDS = 30.0


async def read_bytes(request: web.Request) -> bytes:
    """Read the body.

    Raises:
        TooLarge: larger than the port's limit.
        TooSlow: did not arrive within ``BODY_SECONDS``.
    """
    try:
        if request.content.is_eof():  # all of it is here, and a bound costs more than reading it
            return await request.read()
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise TooSlow(f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(f"the body is too large: {error.text}", advice="send a smaller request") from None


async def read_body(request: web.Request, kind: type[T], *, empty: bool = False) -> T:
    """Read the JSON body as ``kind``; with ``empty`` a missing body reads as ``{}``.

    Raises:
        BadRequest: not JSON or not of the required form; also what :func:`read_bytes` raises.
    """
    data = await read_bytes(request)
    return decode(b"{}" if empty and not data.strip() else data, kind)


async def read_large(request: web.Request, kind: type[T], *, limit: int) -> T:
    """Read a JSON body that may be longer than the port's usual limit, away from the event loop.

    Raises:
        TooLarge: longer than ``limit`` bytes.
        TooSlow: no byte came for ``BODY_SECONDS``.
        BadRequest: not JSON or not of the required form.
    """
    data = bytearray()
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                chunk = await request.content.readany()
        except TimeoutError:
            raise TooSlow(f"no byte of the body came for {BODY_SECONDS:.0f} s") from None
        data += chunk
        if len(data) > limit:
            raise TooLarge(f"the body is larger than {limit} bytes", advice="send a smaller request")
        if not chunk:
            return await asyncio.to_thread(decode, bytes(data), kind)


def json_response(message: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Answer a message."""
    return web.Response(body=encode(message), status=status, content_type="application/json", headers=headers)
