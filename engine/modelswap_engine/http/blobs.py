"""What other pods of the slot may read of this one: blobs by hash, manifests by digest, nothing else and no list.

Only what the content store has complete is given, in ranges, to so many at once and at such a rate that requests for
the model do not feel it. A file that is open stays readable when the store removes it. Reads happen in threads: a blob
that is not in memory any more must not stop the event loop, which sendfile would.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO, Final

from aiohttp import web

from modelswap_engine.checkpoint.rules import is_hash
from modelswap_engine.http.bodies import json_response, read_body
from modelswap_engine.http.errors import RangeNotSatisfiable, response_of
from modelswap_engine.protocol.blobs import BLOBS, Held, HeldRequest
from modelswap_engine.protocol.errors import BadRequest, NotFound, Unavailable
from modelswap_engine.store.content import ContentStore
from modelswap_engine.swap.clock import Clock

PIECE_BYTES: Final = 512 << 10
TRANSFERS: Final = 8
WAITING: Final = 64
TURN_SECONDS: Final = 8.0
"""How long a request waits for its turn; the one who asks has other pods, and the source."""
WRITE_SECONDS: Final = 30.0
"""How long a piece may take to be taken."""


class Bandwidth:
    """Bytes per second that all transfers share; 0 is no bound."""

    def __init__(self, rate: int, *, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._due = 0.0

    async def take(self, nbytes: int) -> None:
        """Return when so many bytes may go."""
        if not self._rate:
            return
        now = self._clock.monotonic()
        begin = max(self._due, now)
        self._due = begin + nbytes / self._rate
        if begin > now:
            await self._clock.sleep(begin - now)


class BlobRoutes:
    """Handlers of the routes.

    Args:
        store: has the blobs.
        manifest: returns the file with the manifest of a digest, whether or not it is there; called in a thread.
        bandwidth: for all that is given.
        given: called with the bytes that went out.
        transfers: how many at once.
    """

    def __init__(
        self,
        *,
        store: ContentStore,
        manifest: Callable[[str], Path],
        bandwidth: Bandwidth,
        given: Callable[[int], None],
        transfers: int = TRANSFERS,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._bandwidth = bandwidth
        self._given = given
        self._turns = asyncio.Semaphore(transfers)
        self._waiting = 0

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        return [
            web.get(f"{BLOBS}/sha256/{{hash}}", self.blob),
            web.get(f"{BLOBS}/manifests/{{digest}}", self.manifest),
            web.post(f"{BLOBS}/held", self.held),
        ]

    async def held(self, request: web.Request) -> web.Response:
        """Say which blobs of a question are here."""
        asked = (await read_body(request, HeldRequest)).sha256
        missing = self._store.missing(asked)
        return json_response(Held(sha256=[sha256 for sha256 in asked if sha256 not in missing]))

    async def blob(self, request: web.Request) -> web.StreamResponse:
        """Give a blob, or a range of it."""
        sha256 = request.match_info["hash"]
        found = await asyncio.to_thread(self._store.open_blob, sha256) if is_hash(sha256) else None
        return await self._answer(request, found, name=sha256)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        """Give the manifest of a version."""
        kind, _, sha256 = request.match_info["digest"].partition(":")
        found = await asyncio.to_thread(self._opened, sha256) if kind == "sha256" and is_hash(sha256) else None
        return await self._answer(request, found, name=sha256)

    def _opened(self, sha256: str) -> BinaryIO | None:
        try:
            return self._manifest(sha256).open("rb", buffering=0)
        except OSError:
            return None

    async def _answer(self, request: web.Request, file: BinaryIO | None, *, name: str) -> web.StreamResponse:
        if file is None:
            raise NotFound("not here", advice="ask another pod, or the source")
        with file:
            size = os.fstat(file.fileno()).st_size
            try:
                start, stop = _range(request, size)
            except RangeNotSatisfiable as error:
                refusal = response_of(error)
                refusal.headers["Content-Range"] = f"bytes */{size}"
                return refusal
            headers = {"Accept-Ranges": "bytes", "ETag": f'"{name}"', "Content-Length": str(stop - start)}
            part = "Range" in request.headers
            if part:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            response = web.StreamResponse(status=206 if part else 200, headers=headers)
            response.content_type = "application/octet-stream"
            if request.method == "HEAD":
                await response.prepare(request)
                return response
            async with self._turn():
                await response.prepare(request)
                try:
                    await self._send(response, file, start, stop)
                except (OSError, TimeoutError):
                    # A length was promised: nothing else may follow, and who asks must not take what came for all.
                    if request.transport is not None:
                        request.transport.abort()
            return response

    async def _send(self, response: web.StreamResponse, file: BinaryIO, start: int, stop: int) -> None:
        for at in range(start, stop, PIECE_BYTES):
            wanted = min(PIECE_BYTES, stop - at)
            await self._bandwidth.take(wanted)
            data = await asyncio.to_thread(os.pread, file.fileno(), wanted, at)
            if len(data) != wanted:
                raise OSError("the blob is shorter than it was")
            async with asyncio.timeout(WRITE_SECONDS):
                await response.write(data)
            self._given(len(data))
        await response.write_eof()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._turns.locked() and self._waiting >= WAITING:
            raise Unavailable("many pods read from this one already", advice="ask another pod, or the source")
        self._waiting += 1
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise Unavailable("other pods read from this one", advice="ask another pod, or the source") from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()


def _range(request: web.Request, size: int) -> tuple[int, int]:
    """Return the first byte that is asked for and the one after the last.

    Raises:
        BadRequest: not one range of bytes.
        RangeNotSatisfiable: none of it is there.
    """
    if "Range" not in request.headers:
        return 0, size
    try:
        start, stop, _ = request.http_range.indices(size)
    except ValueError:
        raise BadRequest("Range is not one range of bytes", advice="ask for bytes=FIRST-LAST") from None
    if start >= stop:
        raise RangeNotSatisfiable(f"there are {size} bytes")
    return start, stop
