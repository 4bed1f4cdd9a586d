"""Who we are at a registry: a name and a password, or a token that they buy from the service that the registry names.

A token is asked for with the right to pull one repository and no more, whatever the registry suggests.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from yarl import URL

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import SourceDenied, SourceUnreadable
from modelswap_engine.sources.web.answers import Target
from modelswap_engine.sources.web.authorization import PASSWORD, USER, Fixed, basic, bearer
from modelswap_engine.sources.web.ranges import Reader

DOCKER_CONFIG: Final = ".dockerconfigjson"
"""The key of Secrets of type kubernetes.io/dockerconfigjson: the same that images are pulled with."""
MAX_TOKEN_BYTES: Final = 1 << 20
_PARAMETER: Final = re.compile(r'(\w+)="([^"]*)"')


class _Login(msgspec.Struct):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _DockerConfig(msgspec.Struct, rename={"creds_store": "credsStore", "cred_helpers": "credHelpers"}):
    auths: dict[str, _Login] = {}
    creds_store: str = ""
    cred_helpers: dict[str, str] = {}


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class RegistryLogin:
    """The header for one repository; see :class:`sources.web.authorization.Authorizer`.

    Args:
        reader: asks for tokens.
        host: of the registry, as a person wrote it.
        repository: the one that is read.
        secret: the ``Basic`` header of who we are; "" for nobody.
        plain: tokens may be asked for without TLS, as the registry is.
    """

    def __init__(self, reader: Reader, *, host: str, repository: str, secret: str, plain: bool) -> None:
        self._reader, self._host, self._repository = reader, host, repository
        self._secret, self._plain = secret, plain
        self._header = ""

    def header(self) -> str:
        """Return what the registry took last."""
        return self._header

    async def challenged(self, challenges: Sequence[str], *, sent: str) -> bool:
        """Do what the registry asks for; False where that was done already."""
        if sent != self._header:
            return True  # somebody else did it meanwhile
        for challenge in challenges:
            kind, _, rest = challenge.partition(" ")
            if kind.lower() == "bearer":
                self._header = await self._bought(dict(_PARAMETER.findall(rest)))
                return self._header != sent
            if kind.lower() == "basic" and self._secret not in {"", sent}:
                self._header = self._secret
                return True
        return False

    async def _bought(self, asked: Mapping[str, str]) -> str:
        where = f"oci://{self._host}/{self._repository}"
        try:
            url = URL(asked.get("realm", ""))
        except ValueError:
            url = URL()
        if not url.host or url.scheme not in ({"https", "http"} if self._plain else {"https"}):
            raise SourceDenied(f"{where}: it sends for tokens to no https address", advice="look at the registry")
        query = {"scope": f"repository:{self._repository}:pull"} | {k: asked[k] for k in ("service",) if k in asked}
        target = Target(
            url=url.with_user(None).update_query(query),
            shown=f"{where}: its tokens",
            host=self._host.partition(":")[0],
            authorizer=Fixed(self._secret),
        )
        found = await self._reader.document(target, limit=MAX_TOKEN_BYTES, accept="application/json")
        try:
            token = msgspec.json.decode(found[0], type=_Token) if found is not None else _Token()
        except (msgspec.MsgspecError, UnicodeDecodeError):
            token = _Token()
        if not (token.token or token.access_token):
            raise SourceUnreadable(f"{target.shown}: none came", advice="look at the registry's token service")
        return bearer(token.token or token.access_token)


def secret_of(values: Mapping[str, str], *, host: str) -> str:
    """Return the ``Basic`` header for a registry out of mounted credentials; "" where they have none.

    Raises:
        SourceDenied: they cannot be read, or name a program instead of a login.
    """
    if values.get(USER):
        return basic(values[USER], values.get(PASSWORD, ""))
    try:
        config = msgspec.json.decode(values.get(DOCKER_CONFIG, "{}"), type=_DockerConfig)
        mine = [login for name, login in config.auths.items() if _host_of(name) == _host_of(host)]
        for login in mine:
            if login.username:
                return basic(login.username, login.password)
            if login.auth:
                user, _, password = base64.b64decode(login.auth, validate=True).decode().partition(":")
                return basic(user, password)
    except (msgspec.MsgspecError, binascii.Error, UnicodeDecodeError):
        raise SourceDenied(f"the mounted {DOCKER_CONFIG} cannot be read", advice="look at the Secret") from None
    helpers = [helper for name, helper in config.cred_helpers.items() if _host_of(name) == _host_of(host)]
    helpers += [config.creds_store] if config.creds_store and (mine or not config.auths) else []
    found = [f"the credential helper {shown(helper, 60)}, a program that pods do not have" for helper in helpers]
    found += ["an identity token, which is not spoken here"] if any(login.identitytoken for login in mine) else []
    if found:
        raise SourceDenied(
            f"the mounted {DOCKER_CONFIG} has no login for {host}, but {found[0]}",
            advice="mount a login that a controller keeps fresh (guide of OCI registries, Cloud registries)",
        )
    return ""


def _host_of(name: str) -> str:
    host = name.removeprefix("https://").removeprefix("http://").partition("/")[0].lower()
    return "docker.io" if host in {"index.docker.io", "registry-1.docker.io"} else host
