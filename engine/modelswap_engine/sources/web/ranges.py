"""Files by ranges: what comes is exactly what was asked for, of the revision that was asked for, or it is an error.

What breaks off goes on where it stopped, with pauses, until patience ends. Knows no checkpoint and no scheme.
"""

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import aiohttp
from aiohttp.abc import AbstractResolver

from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.sources.credentials import CA
from modelswap_engine.sources.remote.port import RETRY_AFTER, FileStat
from modelswap_engine.sources.web.answers import GONE, Target, check_part, revision_of, trouble, wanted, whole_size
from modelswap_engine.sources.web.client import Answer, Web
from modelswap_engine.sources.web.patience import Passing, Patience
from modelswap_engine.sources.web.proxies import DIRECT, Proxies
from modelswap_engine.sources.web.reach import Reach

PIECE_BYTES: Final = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """How all sources over HTTP ask; the rest is for tests."""

    reach: Reach
    patience: Patience = Patience()  # noqa: RUF009 - frozen
    stall: float = 30.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    chance: Callable[[], float] = random.random
    now: Callable[[], float] = time.time
    resolver: AbstractResolver | None = None
    proxies: Proxies = DIRECT


class Reader:
    """Reads files of one place; closed by who opened it.

    Args:
        web: its connections.
        settings: how to ask.
    """

    def __init__(self, web: Web, settings: WebSettings) -> None:
        self._web, self._settings = web, settings

    @classmethod
    async def opened(cls, settings: WebSettings, credentials: Mapping[str, str]) -> "Reader":
        """Return one that believes the system's authorities, and the one of the credentials."""
        trust = await asyncio.to_thread(_trust, credentials.get(CA, ""))
        web = Web(
            trust=trust,
            reach=settings.reach,
            stall=settings.stall,
            resolver=settings.resolver,
            proxies=settings.proxies,
        )
        return cls(web, settings)

    async def close(self) -> None:
        """Close its connections."""
        await self._web.close()

    async def look(self, target: Target) -> FileStat | None:
        """Return what a file is; None: it is not there. One byte is read, which also shows that ranges are served.

        Raises:
            SourceDenied, SourceUnreadable, SourceNotAllowed: see the module.
        """
        return await self._patiently(lambda: self._look(target))

    async def _look(self, target: Target) -> FileStat | None:
        async with self._asked(target, {"Range": "bytes=0-0"}) as answer:
            if answer.status in GONE:
                return None
            size = whole_size(answer)
            if size is not None:
                return FileStat(size=size, revision=revision_of(answer) if target.tagged else "")
            raise trouble(answer, target, now=self._settings.now())

    async def document(self, target: Target, *, limit: int, accept: str) -> tuple[bytes, Mapping[str, str]] | None:
        """Read a small file whole, as it is now; return it and the answer's headers; None: it is not there.

        Raises:
            SourceDenied, SourceUnreadable, SourceNotAllowed: see the module.
        """
        return await self._patiently(lambda: self._document(target, limit, accept))

    async def _document(self, target: Target, limit: int, accept: str) -> tuple[bytes, Mapping[str, str]] | None:
        async with self._asked(target, {"Accept": accept}) as answer:
            if answer.status in GONE:
                return None
            if answer.status != 200:
                raise trouble(answer, target, now=self._settings.now())
            held = bytearray()
            async for data in answer.response.content.iter_any():
                held += data
                if len(held) > limit:
                    raise SourceUnreadable(f"{target.shown}: more than {limit} bytes", advice="look at the server")
            return bytes(held), answer.response.headers

    async def stream(self, target: Target, start: int, stop: int, *, stat: FileStat) -> AsyncIterator[bytes]:
        """Yield bytes ``start`` to ``stop`` (excluded) of a file of that size and revision.

        Raises:
            SourceChanged, SourceDenied, SourceUnreadable, SourceNotAllowed: see the module.
        """
        done, failures = start, 0
        while done < stop:
            try:
                async with self._asked(target, wanted(target, done, stop, stat=stat)) as answer:
                    check_part(answer, target, done, stop, stat=stat, now=self._settings.now())
                    async for piece in _pieces(answer, target, stop - done):
                        done, failures = done + len(piece), 0
                        yield piece
                if done < stop:
                    raise Passing(SourceUnreadable(f"{target.shown}: it broke off at byte {done}"))
            except Passing as passing:
                failures += 1
                await self._wait(passing, failures)

    @asynccontextmanager
    async def _asked(self, target: Target, headers: Mapping[str, str]) -> AsyncIterator[Answer]:
        for last in (False, True):
            sent = target.authorizer.header()
            async with self._web.ask(target.url, host=target.host, headers=headers, authorization=sent) as answer:
                if answer.status == 401 and not (last or answer.redirected):
                    challenges = answer.response.headers.getall("WWW-Authenticate", [])
                    if await target.authorizer.challenged(challenges, sent=sent):
                        continue
                yield answer
                return

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        failures = 0
        while True:
            try:
                return await attempt()
            except Passing as passing:
                failures += 1
                await self._wait(passing, failures)

    async def _wait(self, passing: Passing, failures: int) -> None:
        settings = self._settings
        pause = settings.patience.pause(failures, after=passing.after, chance=settings.chance())
        if pause is None:
            if passing.after > settings.patience.longest:
                passing.error.details[RETRY_AFTER] = f"{passing.after:.0f}"
            raise passing.error from None
        await settings.sleep(pause)


def _trust(authority: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if authority:
        try:
            context.load_verify_locations(cadata=authority)
        except (ssl.SSLError, ValueError):
            raise SourceUnreadable(f"the mounted {CA} holds no certificate", advice="look at the Secret") from None
    return context


async def _pieces(answer: Answer, target: Target, left: int) -> AsyncIterator[bytes]:
    """Yield a body in pieces that are worth a write each; what came before it broke off is yielded too."""
    held: list[bytes] = []
    size = 0
    try:
        async for data in answer.response.content.iter_any():
            held.append(data)
            size, left = size + len(data), left - len(data)
            if left < 0:
                raise SourceUnreadable(f"{target.shown}: it sent more than was asked for", advice="look at the server")
            if size >= PIECE_BYTES:
                yield b"".join(held)
                held, size = [], 0
            if not left:
                break
    except (aiohttp.ClientError, OSError):
        if held:
            yield b"".join(held)
        raise
    if held:
        yield b"".join(held)
