"""How a pod gets the cluster's signing keys: over TLS, as itself, from the API server and nowhere else."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from modelswap_engine.http.cluster import ApiServerKeys, cluster_authenticator, peer_authenticator
from modelswap_engine.protocol.errors import BadRequest, Unauthenticated, Unavailable
from tests.support.tokens import NOW, POD_UID, SUBJECT, Signer, claims, key_set

SIGNER = Signer("rsa-1")
OWN_TOKEN = SIGNER.sign(claims(sub="system:serviceaccount:models:engine", aud=["api"]))


class ApiServer:
    """The one route of an API server that is needed here."""

    def __init__(self) -> None:
        self.status = 200
        self.document = key_set(SIGNER)
        self.port = 0

    async def jwks(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {OWN_TOKEN}":
            return web.Response(status=401)
        if self.status == 302:
            raise web.HTTPFound("http://elsewhere.invalid/")
        return web.Response(body=self.document, status=self.status)


@asynccontextmanager
async def api_server(authority: trustme.CA) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/openid/v1/jwks", server.jwks)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


def account(folder: Path, authority: trustme.CA) -> Path:
    """Write what the kubelet mounts."""
    (folder / "token").write_text(f"{OWN_TOKEN}\n")
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    return folder


async def test_a_pod_checks_the_operators_token_by_the_clusters_keys(tmp_path: Path) -> None:
    authority = trustme.CA()
    folder = account(tmp_path, authority)
    async with api_server(authority) as server:
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        authenticator = await cluster_authenticator(
            pod_uid=POD_UID, subjects=frozenset({SUBJECT}), environment=environment, account=folder
        )
        token = SIGNER.sign(claims(iat=1, nbf=1, exp=int(NOW) * 2))
        assert (await authenticator.authenticate(token)).subject == SUBJECT


async def test_pods_of_one_kind_know_each_other_by_what_their_own_token_says(tmp_path: Path) -> None:
    authority, times = trustme.CA(), {"iat": 1, "nbf": 1, "exp": int(NOW) * 2}
    folder, own = account(tmp_path, authority), tmp_path / "peers"
    mine = {"sub": "system:serviceaccount:team:chat", "aud": ["modelswap-peers.chat.team"], **times}
    own.write_text(SIGNER.sign(claims(**mine)))
    async with api_server(authority) as server:
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        peers = await peer_authenticator(token_file=own, environment=environment, account=folder)
        assert (await peers.authenticate(SIGNER.sign(claims(**mine)))).subject == mine["sub"]
        with pytest.raises(Unauthenticated, match="another audience"):
            await peers.authenticate(SIGNER.sign(claims(**{**mine, "aud": [POD_UID]})))
        for content in ("", "no token", SIGNER.sign(claims(**{**mine, "aud": ["a", "b"]}))):
            own.write_text(content)
            with pytest.raises(BadRequest, match="--peer-token-file"):
                await peer_authenticator(token_file=own, environment=environment, account=folder)


@pytest.mark.parametrize("status", [403, 500, 302])
async def test_other_answers_are_no_keys(tmp_path: Path, status: int) -> None:
    authority = trustme.CA()
    folder = account(tmp_path, authority)
    async with api_server(authority) as server:
        server.status = status
        with pytest.raises(ValueError, match=str(status)):
            await ApiServerKeys(f"https://127.0.0.1:{server.port}", account=folder)()


async def test_a_server_of_another_authority_is_not_believed(tmp_path: Path) -> None:
    folder = account(tmp_path, trustme.CA())
    async with api_server(trustme.CA()) as server:
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        authenticator = await cluster_authenticator(
            pod_uid=POD_UID, subjects=frozenset({SUBJECT}), environment=environment, account=folder
        )
        with pytest.raises(Unavailable):
            await authenticator.authenticate(SIGNER.sign(claims()))


async def test_outside_a_pod_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="in a pod only") as outside:
        await cluster_authenticator(pod_uid="p", subjects=frozenset({"s"}), environment={}, account=tmp_path)
    assert "token-file" in outside.value.advice
    with pytest.raises(BadRequest, match="service-account token"):
        await cluster_authenticator(
            pod_uid="p", subjects=frozenset({"s"}), environment={"KUBERNETES_SERVICE_HOST": "x"}, account=tmp_path
        )
