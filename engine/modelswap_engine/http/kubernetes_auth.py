"""Offline check of Kubernetes service-account tokens (docs/architecture.md, Pieces).

The operator asks the API server for a token of its own service account whose audience is this pod's UID. Here
the signature is checked against the cluster's published keys, so no call per request is made, no secret is
shared, and the token is useless to any other pod. Keys come through an injected fetcher; this module speaks no
HTTP itself.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jwt
import structlog

from modelswap_engine.http.auth import MAX_TOKEN_CHARACTERS, Principal
from modelswap_engine.protocol.errors import Forbidden, Unauthenticated, Unavailable, WrongPod

ALGORITHMS: Final = ("RS256", "ES256")
LEEWAY_SECONDS: Final = 10.0

FetchKeys = Callable[[], Awaitable[bytes]]
Clock = Callable[[], float]

_log = structlog.get_logger("modelswap.auth")


@dataclass(frozen=True)
class Expected:
    """What a good token says: for this pod, from this cluster, by one of these subjects.

    ``one_pod`` says that the audience is this pod's UID: what is meant for another UID came to the wrong pod then.
    """

    audience: str
    issuer: str
    subjects: frozenset[str]
    one_pod: bool = False


class KeySet:
    """The cluster's signing keys by id, fetched when needed.

    An unknown id triggers a fetch, but at most one per ``min_interval`` seconds, so that made-up ids cannot turn
    this pod into a load generator against the API server. Keys older than ``max_age`` are fetched again; while
    that fails the ones in hand stay in use, so that a swap does not depend on the API server being up.
    """

    def __init__(self, fetch: FetchKeys, *, clock: Clock, min_interval: float = 10.0, max_age: float = 3600.0) -> None:
        self._fetch = fetch
        self._clock = clock
        self._min_interval = min_interval
        self._max_age = max_age
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._lock = asyncio.Lock()

    async def key(self, kid: str) -> jwt.PyJWK | None:
        """Return the key with this id, or None when the cluster has no such key.

        Raises:
            Unavailable: no keys have ever been fetched.
        """
        if kid in self._keys and not self._stale():
            return self._keys[kid]  # nobody with a good token waits for the fetch that a made-up id began
        async with self._lock:
            if kid not in self._keys or self._stale():
                await self._refresh()
        if self._fetched_at is None:
            raise Unavailable("the cluster's signing keys cannot be read yet, so no token can be checked")
        return self._keys.get(kid)

    def _stale(self) -> bool:
        return self._fetched_at is None or self._clock() - self._fetched_at > self._max_age

    async def _refresh(self) -> None:
        now = self._clock()
        if self._tried_at is not None and now - self._tried_at < self._min_interval:
            return
        self._tried_at = now
        try:
            self._keys = parse_keys(await self._fetch())
        except (OSError, ValueError, TimeoutError) as error:
            _log.warning("signing keys not fetched", reason=str(error))
            return
        self._fetched_at = now


def parse_keys(document: bytes) -> dict[str, jwt.PyJWK]:
    """Read a JWKS; keys without an id, of other kinds or for other uses are left out.

    Raises:
        ValueError: not a JWKS.
    """
    try:
        data = json.loads(document)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict) or not isinstance(data.get("keys"), list):
        raise ValueError("not a JSON Web Key Set")
    keys: dict[str, jwt.PyJWK] = {}
    for entry in data["keys"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("kid"), str):
            continue
        if entry.get("kty") not in ("RSA", "EC") or entry.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK.from_dict(entry)
        except jwt.PyJWTError:
            continue
        if key.algorithm_name in ALGORITHMS:
            keys[entry["kid"]] = key
    return keys


def issuer_of(own_token: str) -> str:
    """Return the issuer named in this pod's own token, which is trusted because the kubelet wrote it.

    Raises:
        ValueError: the file holds no service-account token.
    """
    issuer = _own_claims(own_token).get("iss")
    if not isinstance(issuer, str) or not issuer:
        raise ValueError("the token names no issuer")
    return issuer


def like(own_token: str) -> Expected:
    """Return what the tokens of other pods of this one's kind say: what its own does, issuer, audience and subject.

    Raises:
        ValueError: it is no service-account token for one audience.
    """
    issuer, claims = issuer_of(own_token), _own_claims(own_token)
    audience, subject = claims.get("aud"), claims.get("sub")
    audience = audience[0] if isinstance(audience, list) and len(audience) == 1 else audience
    if not (isinstance(audience, str) and audience and isinstance(subject, str) and subject):
        raise ValueError("the token is not for one audience, or of nobody")
    return Expected(audience=audience, issuer=issuer, subjects=frozenset({subject}))


def _own_claims(own_token: str) -> Mapping[str, Any]:
    try:
        return jwt.decode(own_token, options={"verify_signature": False})
    except jwt.PyJWTError as error:
        raise ValueError(f"not a service-account token: {error}") from None


class KubernetesAuthenticator:
    """Accepts tokens of the allowed service accounts for one audience: this very pod, or whoever shares with it."""

    def __init__(self, *, expected: Expected, keys: KeySet, clock: Clock) -> None:
        self._expected = expected
        self._keys = keys
        self._clock = clock

    async def authenticate(self, token: str | None) -> Principal:
        """Check signature, issuer, time, audience and subject, in this order.

        Raises:
            Unauthenticated: no token, or any of the first four is wrong.
            Forbidden: a good token of a subject that is not on the list.
            WrongPod: a good token for another pod, which had this address before, or has it soon.
            Unavailable: the cluster's keys could not be read yet.
        """
        if not token:
            raise _refused("no bearer token")
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise _refused("the token is too long")
        key = await self._keys.key(_key_id(token))
        if key is None:
            raise _refused("the token is signed by a key that this cluster does not have")
        claims = self._verify(token, key)
        self._check_times(claims)
        meant = self._meant_for(claims)
        subject = claims.get("sub")
        if not isinstance(subject, str) or subject not in self._expected.subjects:
            raise Forbidden(
                f"subject {str(subject)[:200]!r} may not use this control port",
                advice="start the sidecar with --allowed-subject for it",
            )
        if meant != self._expected.audience:  # said only to who may decide here
            raise WrongPod(
                f"the token is for the pod with UID {meant}, this is {self._expected.audience}",
                advice="list the pods again: addresses are reused",
                details={"expected": meant, "actual": self._expected.audience},
            )
        return Principal(subject=subject)

    def _meant_for(self, claims: Mapping[str, Any]) -> str:
        """Return whom a token is for: the one it is looked at for, or, where that is a pod, the UID of another."""
        named = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
        if self._expected.audience in named:
            return self._expected.audience
        if self._expected.one_pod and len(named) == 1 and _is_uid(named[0]):
            return str(named[0])
        raise _refused(f"the token is for another audience than {self._expected.audience!r}")

    def _verify(self, token: str, key: jwt.PyJWK) -> Mapping[str, Any]:
        try:
            return jwt.decode(
                token,
                key=key,
                algorithms=list(ALGORITHMS),
                issuer=self._expected.issuer,
                # Times are checked against the injected clock, and the audience where it is known what it means.
                options={
                    "require": ["exp", "iat", "aud", "iss", "sub"],
                    "verify_aud": False,
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidIssuerError:
            raise _refused("the token comes from another issuer") from None
        except jwt.PyJWTError as error:
            raise _refused(f"the token is not valid: {type(error).__name__}") from None

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        now = self._clock()
        for name in ("exp", "iat", "nbf"):
            value = claims.get(name, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _refused(f"the token's {name} is not a time")
        if now >= claims["exp"] + LEEWAY_SECONDS:
            raise _refused("the token has expired")
        if now < max(claims["iat"], claims.get("nbf", 0.0)) - LEEWAY_SECONDS:
            raise _refused("the token is not valid yet")


def _is_uid(text: object) -> bool:
    """Say whether a text has the form in which the API server writes UIDs."""
    try:
        return isinstance(text, str) and str(uuid.UUID(text)) == text
    except ValueError:
        return False


def _key_id(token: str) -> str:
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _refused("not a JSON Web Token") from None
    if header.get("alg") not in ALGORITHMS:
        raise _refused(f"the token's algorithm is not one of {', '.join(ALGORITHMS)}")
    kid = header.get("kid")
    if not isinstance(kid, str) or not kid:
        raise _refused("the token names no key")
    return kid


def _refused(reason: str) -> Unauthenticated:
    return Unauthenticated(
        reason,
        advice="request a token of an allowed service account; its audience is the pod's UID, where it may decide",
    )
