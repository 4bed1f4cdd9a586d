"""Who may use the control port.

An authenticator turns a bearer token into a principal or refuses; it knows no routes. Outside a cluster tokens
come from a file; ``http/kubernetes_auth.py`` checks service-account tokens. No token is ever logged or echoed.
"""

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from modelswap_engine.http.errors import Handler
from modelswap_engine.protocol.errors import BadRequest, ModelswapError, Unauthenticated

MAX_TOKEN_CHARACTERS: Final = 16_384
"""Longer ones are refused before anything parses them."""

_log = structlog.get_logger("modelswap.auth")


@dataclass(frozen=True)
class Principal:
    """The caller, as far as it was proved."""

    subject: str


class Authenticator(Protocol):
    """Decides whether a bearer token is good."""

    async def authenticate(self, token: str | None) -> Principal:
        """Return the principal.

        Raises:
            Unauthenticated: no token, or not a valid one.
            Forbidden: a valid one of somebody who is not on the list.
            Unavailable: validity cannot be decided now.
        """


class InsecureAuthenticator:
    """Lets everybody in; exists only for ``--insecure`` and says so."""

    def __init__(self) -> None:
        _log.warning("THE CONTROL PORT IS OPEN TO EVERYBODY (--insecure): anyone who reaches it can swap weights")

    async def authenticate(self, token: str | None) -> Principal:
        """Accept."""
        return Principal(subject="anonymous")


class TokenFileAuthenticator:
    """Accepts the tokens in a file, one a line; ``#`` starts a comment.

    The file is read again when it changes, so tokens rotate without a restart: put the new one beside the old
    one, move the clients, remove the old one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Read the file now, so that a bad one is reported at start.

        Raises:
            BadRequest: not readable, or without a token.
        """
        async with self._lock:
            await asyncio.to_thread(self._refresh)

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise BadRequest(f"token file {self._path}: {reason}", advice="create it with one token a line") from None
        tokens = tuple(line.strip().encode() for line in lines if line.strip() and not line.strip().startswith("#"))
        if not tokens:
            raise BadRequest(f"token file {self._path}: no token in it", advice="write one token a line")
        self._tokens, self._stamp = tokens, stamp

    async def authenticate(self, token: str | None) -> Principal:
        """Compare with every token in constant time.

        Raises:
            Unauthenticated: no token, or none of the file's.
        """
        if not token or len(token) > MAX_TOKEN_CHARACTERS:
            raise _unauthenticated("no bearer token" if not token else "the token is too long")
        try:
            await self.load()
        except BadRequest as error:
            # A file that went away in operation revokes every token.
            _log.error("token file unreadable", reason=error.message)
            raise _unauthenticated("no token is valid now") from None
        given = token.encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(given, known) for known in self._tokens]
        if not any(matches):
            raise _unauthenticated("the token is not valid")
        return Principal(subject="token-file")


class EitherAuthenticator:
    """Accepts whomever one of two accepts.

    Args:
        first: asked first.
        second: asked when the first refuses; its refusal is told.
    """

    def __init__(self, first: Authenticator, second: Authenticator) -> None:
        self._first, self._second = first, second

    async def authenticate(self, token: str | None) -> Principal:
        """Ask one, then the other.

        Raises:
            Unauthenticated, Forbidden, Unavailable: of the second.
        """
        try:
            return await self._first.authenticate(token)
        except ModelswapError:
            return await self._second.authenticate(token)


def _unauthenticated(reason: str) -> Unauthenticated:
    return Unauthenticated(reason, advice="send 'Authorization: Bearer <token>' with a valid token")


def bearer_token(header: str | None) -> str | None:
    """Return the token of an ``Authorization`` header, or None."""
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def auth_middleware(
    authenticator: Authenticator,
    *,
    open_paths: frozenset[str],
    keyed_paths: frozenset[str] = frozenset(),
    others: Mapping[str, Authenticator] = MappingProxyType({}),
) -> Middleware:
    """Return a middleware that asks for a valid token.

    Args:
        authenticator: judges tokens.
        open_paths: may be read without one.
        keyed_paths: their handlers ask for a key of another kind themselves.
        others: who judges in its place on some routes, by the route's own pattern: what a path looks like decides
            nothing that the router might see otherwise.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        reads = request.method in ("GET", "HEAD") and request.path in open_paths
        if not reads and request.path not in keyed_paths:
            resource = request.match_info.route.resource
            other = others.get(resource.canonical) if resource is not None else None
            token = bearer_token(request.headers.get("Authorization"))
            principal = await (other or authenticator).authenticate(token)
            if request.method == "POST" and other is None:
                _log.info("control call", path=request.path, subject=principal.subject, remote=request.remote)
        return await handler(request)

    return middleware
