"""Tokens of pods as a real API server makes them, shown to the control port of another pod of the slot."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession

from modelswap_engine.http.cluster import cluster_authenticator, peer_authenticator
from modelswap_engine.protocol.blobs import BLOBS
from modelswap_engine.protocol.version import CONTROL_PREFIX
from tests.support.apiserver import ApiServer
from tests.support.memory_places import MemoryPlaces
from tests.support.peer_pods import PeerPod
from tests.support.rest import Rest

pytestmark = pytest.mark.api

NAMESPACE, POD_UID = "sharing", "0b5f2f6e-0000-4000-8000-000000000001"
AUDIENCE = "modelswap-peers.chat.sharing"
BLOB = b"a blob"
HASH = hashlib.sha256(BLOB).hexdigest()


class Accounts:
    """Service accounts of a namespace, and tokens of theirs."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        rest.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}}).accepted()
        for name in ("chat", "other", "operator"):
            rest.call("POST", f"{self._path}", {"metadata": {"name": name}}).accepted()

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"

    def token(self, account: str, audience: str = "") -> str:
        """What the kubelet projects into a pod of the account; without an audience for the API server itself."""
        spec = {"expirationSeconds": 600, "audiences": [audience] if audience else []}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        made = self._rest.call("POST", f"{self._path}/{account}/token", body).accepted()
        return str(made["status"]["token"])


@pytest.fixture(scope="module")
def accounts(rest: Rest) -> Accounts:
    return Accounts(rest)


@pytest.fixture
def pod(tmp_path: Path) -> PeerPod:
    made = PeerPod(tmp_path / "pod", MemoryPlaces(), [], allow=["mem://bucket"])
    made.store.put(HASH, BLOB)
    return made


@pytest.fixture
async def port(definitions: ApiServer, accounts: Accounts, pod: PeerPod, tmp_path: Path) -> AsyncIterator[int]:
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(accounts.token("chat"))
    (account / "ca.crt").write_bytes(definitions.ca.read_bytes())
    own = tmp_path / "peers-token"
    own.write_text(accounts.token("chat", AUDIENCE))
    host, _, number = definitions.url.removeprefix("https://").partition(":")
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": number}
    operator = f"system:serviceaccount:{NAMESPACE}:operator"
    control = await cluster_authenticator(
        pod_uid=POD_UID, subjects=frozenset({operator}), environment=environment, account=account
    )
    peers = await peer_authenticator(token_file=own, environment=environment, account=account)
    async with pod.listening(control=control, peers=peers) as listening:
        yield listening


async def test_a_pod_of_the_slot_reads_blobs_and_nothing_else(port: int, accounts: Accounts) -> None:
    async def asked(token: str, path: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as got:
            return got.status

    blob, state = f"{BLOBS}/sha256/{HASH}", f"{CONTROL_PREFIX}/state"
    tokens = {
        (account, audience): await asyncio.to_thread(accounts.token, account, audience)
        for account in ("chat", "other", "operator")
        for audience in (AUDIENCE, "modelswap-peers.code.sharing", POD_UID, "")
    }
    may = {key for key, token in tokens.items() if await asked(token, blob) == 200}
    assert may == {("chat", AUDIENCE), ("operator", POD_UID)}
    assert {key for key, token in tokens.items() if await asked(token, state) == 200} == {("operator", POD_UID)}
