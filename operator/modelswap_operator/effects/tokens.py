"""A token of the operator's own service account for one pod only: its audience is the pod's UID.

Kept until four fifths of its life are over, then asked for again; a token for a pod that is gone is forgotten.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from modelswap_engine.protocol.errors import Unavailable
from modelswap_operator.effects import paths
from modelswap_operator.effects.kube import ApiError, Kube

LIFE_SECONDS = 600
KEPT_SHARE = 0.8
KEPT_TOKENS = 4096


class TokenRefused(Unavailable):
    """The API server gave no token."""

    code = "TokenRequestRefused"


class Tokens(Protocol):
    """Where bearer tokens come from."""

    async def token(self, pod_uid: str) -> str | None:
        """Return a token for a pod; None means that calls go out without one."""

    def forget(self, pod_uid: str) -> None:
        """Drop a token that was refused."""


class NoTokens:
    """For sidecars that run without authentication (development)."""

    async def token(self, pod_uid: str) -> str | None:
        return None

    def forget(self, pod_uid: str) -> None:
        return None


@dataclass(frozen=True)
class _Kept:
    token: str
    until: datetime


class ServiceAccountTokens:
    """TokenRequest for the operator's own service account."""

    def __init__(self, kube: Kube, *, namespace: str, account: str, now: Callable[[], datetime]) -> None:
        self._kube = kube
        self._path = paths.core("serviceaccounts", namespace, account, "token")
        self._now = now
        self._kept: dict[str, _Kept] = {}

    async def token(self, pod_uid: str) -> str | None:
        """Return a token whose audience is the pod's UID.

        Raises:
            TokenRefused: the API server gave none.
        """
        now = self._now()
        kept = self._kept.get(pod_uid)
        if kept is not None and now < kept.until:
            return kept.token
        try:
            answer = await self._kube.create(
                self._path,
                {
                    "apiVersion": "authentication.k8s.io/v1",
                    "kind": "TokenRequest",
                    "spec": {"audiences": [pod_uid], "expirationSeconds": LIFE_SECONDS},
                },
            )
        except ApiError as error:
            raise TokenRefused(
                f"no token for pod UID {pod_uid}: {error.message}",
                advice="the operator's Role must allow create on serviceaccounts/token of its own account",
            ) from None
        token = str(answer["status"]["token"])
        self._trim()
        # No API server may give less: its own bound is an hour at least. Its clock and ours need not agree so.
        self._kept[pod_uid] = _Kept(token, now + timedelta(seconds=LIFE_SECONDS * KEPT_SHARE))
        return token

    def forget(self, pod_uid: str) -> None:
        """Drop the token of a pod."""
        self._kept.pop(pod_uid, None)

    def _trim(self) -> None:
        now = self._now()
        if len(self._kept) >= KEPT_TOKENS:
            self._kept = {uid: kept for uid, kept in self._kept.items() if now < kept.until}
