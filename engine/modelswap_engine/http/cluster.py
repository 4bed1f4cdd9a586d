"""What ``--auth kubernetes`` needs of the cluster: this pod's own token, the cluster's CA and its signing keys.

The only place of the front that is a client of the API server, and only of one path that every service account may
read. Kept apart from the check itself, which stays free of I/O.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import aiohttp

from modelswap_engine.http.kubernetes_auth import Expected, KeySet, KubernetesAuthenticator, issuer_of, like
from modelswap_engine.protocol.errors import BadRequest

ACCOUNT_DIR: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JWKS_PATH: Final = "/openid/v1/jwks"
FETCH_SECONDS: Final = 10.0


class ApiServerKeys:
    """Fetches the signing keys as this pod's own service account."""

    def __init__(self, url: str, *, account: Path) -> None:
        self._url = url
        self._account = account

    async def __call__(self) -> bytes:
        """Read the key set; token and CA are read each time because the kubelet rotates them.

        Raises:
            OSError, TimeoutError, ValueError: it could not be had.
        """
        token = await asyncio.to_thread(read_own_token, self._account)
        context = await asyncio.to_thread(ssl.create_default_context, cafile=str(self._account / "ca.crt"))
        timeout = aiohttp.ClientTimeout(total=FETCH_SECONDS)
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._url + JWKS_PATH, headers=headers, ssl=context, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise ValueError(f"the API server answered {response.status} to {JWKS_PATH}")
                return await response.read()
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from None


def read_own_token(account: Path) -> str:
    """Return the token that the kubelet keeps fresh in the pod."""
    return (account / "token").read_text(encoding="ascii").strip()


async def cluster_authenticator(
    *, pod_uid: str, subjects: frozenset[str], environment: Mapping[str, str], account: Path = ACCOUNT_DIR
) -> KubernetesAuthenticator:
    """Build the authenticator of a pod.

    Raises:
        BadRequest: this process is not in a pod with a service-account token.
    """
    keys = _keys(environment, account=account)
    try:
        issuer = issuer_of(await asyncio.to_thread(read_own_token, account))
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"this pod's service-account token in {account}: {error}",
            advice="mount a service-account token and the cluster's CA there, as the engine's chart does",
        ) from None
    expected = Expected(audience=pod_uid, issuer=issuer, subjects=subjects, one_pod=True)
    return KubernetesAuthenticator(expected=expected, keys=keys, clock=time.time)


async def peer_authenticator(
    *, token_file: Path, environment: Mapping[str, str], account: Path = ACCOUNT_DIR
) -> KubernetesAuthenticator:
    """Build the authenticator of what pods of a slot share: their tokens say the same as this pod's own for it.

    Raises:
        BadRequest: there is no such token, or this process is not in a pod.
    """
    keys = _keys(environment, account=account)
    try:
        expected = like((await asyncio.to_thread(token_file.read_text, "ascii")).strip())
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"--peer-token-file {token_file}: {error}",
            advice="project a service-account token there, with an audience of the slot's own (see the chart)",
        ) from None
    return KubernetesAuthenticator(expected=expected, keys=keys, clock=time.time)


def _keys(environment: Mapping[str, str], *, account: Path) -> KeySet:
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise BadRequest("--auth kubernetes works in a pod only", advice="use --auth token-file outside a cluster")
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return KeySet(ApiServerKeys(url, account=account), clock=time.time)
