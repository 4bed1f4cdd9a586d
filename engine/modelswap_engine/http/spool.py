"""Puts large request bodies down in files as they arrive, so that the engine's processes can read them.

Bounded in size, and in the time without a byte; nothing of a body outlives its request.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Final

from aiohttp import web

from modelswap_engine.http.errors import TooLarge, TooSlow
from modelswap_engine.protocol.errors import Unavailable

IDLE_SECONDS: Final = 30.0
_BATCH: Final = 4 << 20


class Spool:
    """One folder for bodies.

    Args:
        folder: is emptied: what lies there is of a process that is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ready = False

    @contextlib.asynccontextmanager
    async def body(self, request: web.Request, *, limit: int) -> AsyncIterator[Path]:
        """Yield the file with the body of a request while the context lasts.

        Raises:
            TooLarge: more than ``limit`` bytes.
            TooSlow: no byte came for half a minute.
            Unavailable: the disk does not take it.
        """
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        async with self._file() as file:
            await self._write(request, file, limit=limit)
            yield Path(file.name)

    @contextlib.asynccontextmanager
    async def holding(self, data: bytes) -> AsyncIterator[Path]:
        """Yield a file with these bytes while the context lasts.

        Raises:
            Unavailable: the disk does not take it.
        """
        async with self._file() as file:
            await _put(file, data)
            yield Path(file.name)

    @contextlib.asynccontextmanager
    async def _file(self) -> AsyncIterator[IO[bytes]]:
        try:
            file = await asyncio.to_thread(self._open)
        except OSError as error:
            raise _full(error) from None
        try:
            yield file
        finally:
            await asyncio.to_thread(_remove, file)

    def _open(self) -> IO[bytes]:
        if not self._ready:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True, mode=0o700)
            self._ready = True
        return tempfile.NamedTemporaryFile(dir=self._folder, suffix=".safetensors", delete=False, buffering=0)

    async def _write(self, request: web.Request, file: IO[bytes], *, limit: int) -> None:
        size, batch = 0, bytearray()
        while True:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    chunk = await request.content.readany()
            except TimeoutError:
                raise TooSlow(f"no byte of the body came for {IDLE_SECONDS:.0f} s") from None
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            batch += chunk
            if len(batch) >= _BATCH or (batch and not chunk):
                await _put(file, bytes(batch))
                batch.clear()
            if not chunk:
                return


async def _put(file: IO[bytes], data: bytes) -> None:
    try:
        await asyncio.to_thread(_write_all, file, data)
    except OSError as error:
        raise _full(error) from None


def _write_all(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _remove(file: IO[bytes]) -> None:
    file.close()
    Path(file.name).unlink(missing_ok=True)


def _full(error: OSError) -> Unavailable:
    return Unavailable(
        f"the body cannot be put down: {error.strerror or error}",
        advice="give the state directory a writable volume with free space, or send smaller parts",
    )


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes", advice="send the tensors in several parts")
