"""Asking over HTTP: redirects are followed by hand, and nothing is told that a URL or a header could give away.

Credentials go to the origin that they are for and to no other. Refuses to know files, ranges and when to ask again.
"""

import asyncio
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from socket import AF_UNSPEC
from typing import Final, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from modelswap_engine.protocol.errors import ModelswapError, SourceNotAllowed, SourceUnreadable
from modelswap_engine.sources.web.patience import Passing
from modelswap_engine.sources.web.proxies import DIRECT, Proxies
from modelswap_engine.sources.web.reach import CheckedResolver, Reach

MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_CONNECT_SECONDS: Final = 10.0
_RESOLVE_SECONDS: Final = 2.0
_RESOLVED_SECONDS: Final = 60.0
_READ_BYTES: Final = 1 << 20


class Answer(NamedTuple):
    """What a server answered, whose body is still to be read."""

    response: aiohttp.ClientResponse
    redirected: bool

    @property
    def status(self) -> int:
        """Its status."""
        return self.response.status

    def header(self, name: str) -> str:
        """Return a header; "" where it is not there."""
        return self.response.headers.get(name, "")


class Web:
    """Connections, open until closed; made in the event loop that uses it.

    Args:
        trust: whose certificates are believed.
        reach: where servers may send us.
        stall: seconds without a byte after which an answer is given up.
        resolver: of names; the system's by default.
        proxies: what is asked through which proxy.
    """

    def __init__(
        self,
        *,
        trust: ssl.SSLContext,
        reach: Reach,
        stall: float,
        resolver: AbstractResolver | None = None,
        proxies: Proxies = DIRECT,
    ) -> None:
        self._reach, self._proxies = reach, proxies
        inner = resolver or aiohttp.ThreadedResolver()
        # Two pools, so that a connection to a private address that a person chose is none that a server can choose.
        self._checked = {chosen: CheckedResolver(inner, reach, chosen=chosen) for chosen in (True, False)}
        self._sessions = {chosen: _session(trust, stall, found) for chosen, found in self._checked.items()}
        self._proxied = _session(trust, stall, inner)  # resolves the names of proxies and no others
        self._looked_up: dict[tuple[bool, str], float] = {}

    async def close(self) -> None:
        """Close all connections."""
        for session in (*self._sessions.values(), self._proxied):
            await session.close()

    @asynccontextmanager
    async def ask(
        self, url: URL, *, host: str, headers: Mapping[str, str], authorization: str = ""
    ) -> AsyncIterator[Answer]:
        """GET a URL, following at most five redirects.

        Args:
            url: what to ask for.
            host: the one that a person chose.
            headers: to send with each request.
            authorization: for the URL's own origin only.

        Raises:
            SourceNotAllowed: it leads where it may not.
            SourceUnreadable: it leads nowhere.
            Passing: not now; also while the body is read.
        """
        here = url
        for _ in range(MAX_REDIRECTS + 1):
            async with self._hop(here, host, headers, authorization if _same(here, url) else "") as response:
                if response.status not in _REDIRECTS:
                    yield Answer(response, here != url)
                    return
                here = _next(here, response)
        raise SourceUnreadable(
            f"{_shown(url)}: more than {MAX_REDIRECTS} redirects", advice="name the address that they end at"
        )

    @asynccontextmanager
    async def _hop(
        self, url: URL, host: str, headers: Mapping[str, str], authorization: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        chosen = url.host == host or url.host in self._reach.hosts
        if url.host is not None and _is_address(url.host):  # these are not resolved
            self._reach.check(url.host, host=url.host, chosen=chosen)
        sent = {"Accept-Encoding": "identity", **headers} | ({"Authorization": authorization} if authorization else {})
        proxy = self._proxies.for_url(url)
        if proxy is not None:
            await self._look_up(url.host or "", chosen=chosen)
        with _telling(url):
            async with (self._sessions[chosen] if proxy is None else self._proxied).get(
                url,
                headers=sent,
                allow_redirects=False,
                proxy=proxy.url if proxy is not None else None,
                # The client makes it Proxy-Authorization, and of the proxy alone.
                proxy_headers={"Authorization": proxy.secret} if proxy is not None and proxy.secret else None,
            ) as response:
                yield response

    async def _look_up(self, host: str, *, chosen: bool) -> None:
        """Refuse a name that leads where it may not, as seen from here; a proxy may know names that we do not."""
        now = time.monotonic()
        if self._looked_up.get((chosen, host), now) > now:
            return
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_RESOLVE_SECONDS):
                await self._checked[chosen].resolve(host, family=AF_UNSPEC)
        self._looked_up[chosen, host] = time.monotonic() + _RESOLVED_SECONDS


def _session(trust: ssl.SSLContext, stall: float, resolver: AbstractResolver) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=trust, resolver=resolver),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=stall),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=_READ_BYTES,
    )


def _same(one: URL, other: URL) -> bool:
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def _next(here: URL, response: aiohttp.ClientResponse) -> URL:
    try:
        # As it was written: a signature may be over it.
        url = here.join(URL(response.headers["Location"], encoded=True)).with_user(None)
    except (KeyError, ValueError):
        raise SourceUnreadable(
            f"{_shown(here)}: a redirect to nowhere (status {response.status})", advice="look at the server"
        ) from None
    if url.scheme != "https" and url.scheme != here.scheme:
        raise SourceNotAllowed(
            f"{_shown(here)}: sends to {_shown(url)}, which is not https", advice="let the server redirect to https"
        )
    return url


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _shown(url: URL) -> str:
    """Return a URL without what could be a secret."""
    return str(url.with_user(None).with_query(None).with_fragment(None))[:300]


@contextmanager
def _telling(url: URL) -> Iterator[None]:
    """Tell the client's errors in our words: theirs can hold whole URLs."""
    try:
        yield
    except (ModelswapError, Passing):
        raise
    except aiohttp.ClientConnectorCertificateError:
        raise SourceUnreadable(
            f"{url.host}: its certificate is not of an authority that is trusted here",
            advice="put the authority's certificate into the credentials as ca.crt",
        ) from None
    except aiohttp.InvalidURL:
        raise SourceNotAllowed(f"{_shown(url)}: not an address that can be asked", advice="check it") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Passing(
            SourceUnreadable(f"{_shown(url)}: {_meaning(error)}", advice="it is tried again; check the network")
        ) from None


def _meaning(error: Exception) -> str:
    kinds: dict[type[Exception], str] = {
        aiohttp.ConnectionTimeoutError: "no connection in time",
        TimeoutError: "it sent nothing for too long",
        aiohttp.ClientConnectorDNSError: "its name is not known",
        aiohttp.ClientSSLError: "no TLS with it",
        aiohttp.ClientProxyConnectionError: "no connection to the proxy",
        aiohttp.ClientHttpProxyError: "the proxy refuses it",
        aiohttp.ClientConnectorError: "no connection",
        aiohttp.ClientPayloadError: "it broke off",
        aiohttp.ServerDisconnectedError: "it closed the connection",
        OSError: "the connection was lost",
    }
    return next((text for kind, text in kinds.items() if isinstance(error, kind)), "it answered no HTTP")
