"""Who gives tokens for a registry: the server that a registry's ``WWW-Authenticate: Bearer`` sends its clients to.

It stands for the token service of a hosted registry, which is each vendor's own; the registry itself checks what is
issued. Tokens are for who brings the password, for the scope that was asked for.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from aiohttp import encode_basic_auth, web

from tests.support.servers.hosted import Hosted
from tests.support.tokens import Signer

ISSUER = "tests"
SERVICE = "registry"


class TokenIssuer:
    """One token service; `keys` is what a registry trusts it by."""

    def __init__(self, home: Path, *, user: str, password: str) -> None:
        """Start it, with its public key in a file below `home`."""
        self._expected = encode_basic_auth(user, password)
        self._signer = Signer("tests")
        self.keys = home / "keys.json"
        self.keys.write_text(json.dumps({"keys": [self._signer.jwk()]}))
        self.asked: list[str] = []
        """The scopes that were asked for, in order."""
        self.seconds = 300
        """How long a token is good; negative: it is issued with its time over."""
        app = web.Application()
        app.router.add_get("/token", self._token)
        self._hosted = Hosted(app)
        self.realm = f"{self._hosted.url}/token"

    @property
    def challenge(self) -> dict[str, str]:
        """Return the header with which a registry sends its clients here."""
        return {"WWW-Authenticate": f'Bearer realm="{self.realm}",service="{SERVICE}"'}

    def close(self) -> None:
        """Stop."""
        self._hosted.close()

    async def _token(self, request: web.Request) -> web.Response:
        scope = request.query.get("scope", "")
        self.asked.append(scope)
        if request.headers.get("Authorization") != self._expected:
            return web.json_response({"errors": [{"code": "UNAUTHORIZED"}]}, status=401)
        kind, _, rest = scope.partition(":")
        name, _, actions = rest.rpartition(":")
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": SERVICE,
            "sub": "tester",
            "nbf": now - 600,
            "iat": now,
            "exp": now + self.seconds,
            "jti": str(len(self.asked)),
            "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
        }
        return web.json_response({"token": self._signer.sign(claims), "expires_in": max(self.seconds, 60)})
