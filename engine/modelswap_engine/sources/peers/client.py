"""The HTTP client of another pod's blobs: bounded in time and size, follows nothing, believes nothing.

The token is this pod's own; its file is read for each fetch, because the kubelet rotates it. Where control ports speak
TLS no token goes out before the peer has proved the name.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from yarl import URL

from modelswap_engine.protocol.blobs import BLOBS, MOST_HASHES, Held, HeldRequest
from modelswap_engine.protocol.codec import decode, encode
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.sources.peers.choice import Peer

CONNECT_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 2.0
"""For small answers as a whole."""
READ_SECONDS: Final = 10.0
"""Without a byte: a pod that sends to many has some wait."""
PIECE_BYTES: Final = 1 << 20
_MOST_ANSWER_BYTES: Final = 1 << 20
_LACKING: Final = frozenset({404, 503})


class PeerError(Exception):
    """A peer did not give what it was asked for."""


class PeerLacksError(PeerError):
    """It has not got it, or is too busy to give it; it may have other things."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """How peers are spoken to.

    Attributes:
        token_file: what is shown to them; None shows nothing.
        tls: their control ports speak TLS.
        ca_file: authorities (PEM) that vouch for them with TLS.
        server_name: what they have to prove to be with TLS.
    """

    token_file: Path | None
    tls: bool = False
    ca_file: Path | None = None
    server_name: str = ""

    def read(self) -> tuple[dict[str, str], ssl.SSLContext | None]:
        """Return headers and what TLS is spoken with; blocks.

        Raises:
            OSError, ValueError: a file cannot be used.
        """
        token = self.token_file.read_text(encoding="ascii").split() if self.token_file is not None else []
        headers = {"Authorization": f"Bearer {token[0]}"} if token else {}
        if not self.tls:
            return headers, None
        context = ssl.create_default_context(cafile=self.ca_file)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate authority may stand for itself
        return headers, context


class PeerClient:
    """Asks peers during one fetch.

    Args:
        session: made for it.
        context: with TLS.
        server_name: what a peer must prove to be with TLS.
    """

    def __init__(self, session: aiohttp.ClientSession, *, context: ssl.SSLContext | None, server_name: str) -> None:
        self._session = session
        self._context = context
        self._server_name = server_name

    async def held(self, peer: Peer, hashes: Sequence[str]) -> set[str]:
        """Return which of some blobs a peer says that it has.

        Raises:
            PeerError: it did not answer, or not that.
        """
        found: set[str] = set()
        for at in range(0, len(hashes), MOST_HASHES):
            asked = hashes[at : at + MOST_HASHES]
            body = encode(HeldRequest(sha256=list(asked)))
            async with self._asked("POST", peer, "held", seconds=ANSWER_SECONDS, body=body) as response:
                data = await _whole(response, limit=_MOST_ANSWER_BYTES)
            try:
                found |= set(decode(data, Held).sha256) & set(asked)
            except ModelswapError as error:
                raise PeerError(f"it answered something else: {error.message}") from None
        return found

    async def knows(self, peer: Peer, digest: str) -> bool:
        """Say whether a peer has the manifest of a version.

        Raises:
            PeerError: it has not, or does not answer.
        """
        async with self._asked("HEAD", peer, f"manifests/{digest}", seconds=ANSWER_SECONDS):
            return True

    async def manifest(self, peer: Peer, digest: str, *, limit: int) -> bytes:
        """Return what a peer has as the manifest of a version.

        Raises:
            PeerError: nothing.
        """
        async with self._asked("GET", peer, f"manifests/{digest}", seconds=None) as response:
            return await _whole(response, limit=limit)

    async def blob(self, peer: Peer, sha256: str, *, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a blob from ``start`` to its end ``stop``; whether they are right the caller sees.

        Raises:
            PeerError: it broke off, or is of another size.
        """
        ranged = {"Range": f"bytes={start}-"} if start else {}
        async with self._asked("GET", peer, f"sha256/{sha256}", seconds=None, headers=ranged) as response:
            if response.content_length != stop - start or response.status != (206 if start else 200):
                raise PeerError(f"it offers {response.content_length} bytes where {stop - start} are wanted")
            async for data in response.content.iter_chunked(PIECE_BYTES):
                yield data

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        method: str,
        peer: Peer,
        path: str,
        *,
        seconds: float | None,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        url = URL.build(
            scheme="https" if self._context else "http", host=peer.host, port=peer.port, path=f"{BLOBS}/{path}"
        )
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        try:
            async with self._session.request(
                method,
                url,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                ssl=self._context or True,
                server_hostname=self._server_name or None if self._context else None,
            ) as response:
                if response.status in _LACKING:
                    raise PeerLacksError(f"it answered {response.status}")
                if response.status not in {200, 206}:
                    raise PeerError(f"it answered {response.status}")
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise PeerError(str(error) or type(error).__name__) from None


@contextlib.asynccontextmanager
async def connected(access: Access) -> AsyncIterator[PeerClient]:
    """Yield a client for one fetch.

    Raises:
        PeerError: this pod has no token, or nobody to believe.
    """
    try:
        headers, context = await asyncio.to_thread(access.read)
    except (OSError, ValueError) as error:
        raise PeerError(f"this pod's own token or authorities for peers cannot be read: {error}") from None
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, ttl_dns_cache=None)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, auto_decompress=False, read_bufsize=PIECE_BYTES
    ) as session:
        yield PeerClient(session, context=context, server_name=access.server_name)


async def _whole(response: aiohttp.ClientResponse, *, limit: int) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_chunked(PIECE_BYTES):
        data += piece
        if len(data) > limit:
            raise PeerError(f"it answered more than {limit} bytes")
    return bytes(data)
