"""The registry of these tests hands out ranges of what was pushed, to whom it knows."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import aiohttp
import pytest

from tests.support.servers.registry import MANIFEST_TYPE, PASSWORD, USER, Layer, RegistryServer

pytestmark = pytest.mark.sources

CONTENT = bytes(range(256)) * 16
BLOB = f"blobs/sha256:{hashlib.sha256(CONTENT).hexdigest()}"


async def test_ranges_of_what_was_pushed(registry_server: RegistryServer) -> None:
    digest = await registry_server.push("org/model", "1.0", [Layer(content=CONTENT)])
    async with aiohttp.ClientSession() as session:
        manifest = f"{registry_server.url}/v2/org/model/manifests/1.0"
        async with session.get(manifest, headers={"Accept": MANIFEST_TYPE}) as answer:
            body = await answer.read()
            assert f"sha256:{hashlib.sha256(body).hexdigest()}" == answer.headers["Docker-Content-Digest"] == digest
        blob = f"{registry_server.url}/v2/org/model/{BLOB}"
        async with session.get(blob, headers={"Range": "bytes=10-19"}) as answer:
            assert (answer.status, await answer.read()) == (206, CONTENT[10:20])
            assert answer.headers["Content-Range"] == f"bytes 10-19/{len(CONTENT)}"


async def test_a_password_is_asked_for(tmp_path: Path) -> None:
    with contextlib.closing(RegistryServer(tmp_path, access="password")) as server:
        await server.push("org/model", "1.0", [Layer(content=CONTENT)])
        blob = f"{server.url}/v2/org/model/{BLOB}"
        async with aiohttp.ClientSession() as session:
            async with session.get(blob) as answer:
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"].startswith("Basic ")
            known = {"Authorization": aiohttp.encode_basic_auth(USER, PASSWORD)}
            async with session.get(blob, headers=known) as answer:
                assert await answer.read() == CONTENT


async def test_a_token_is_asked_for_and_its_time_ends(tmp_path: Path) -> None:
    with contextlib.closing(RegistryServer(tmp_path, access="token")) as server:
        assert server.issuer is not None
        await server.push("org/model", "1.0", [Layer(content=CONTENT)])
        blob = f"{server.url}/v2/org/model/{BLOB}"
        async with aiohttp.ClientSession() as session:
            async with session.get(blob) as answer:
                assert f'Bearer realm="{server.issuer.realm}",service="registry"' in answer.headers["WWW-Authenticate"]
            known = await server.authorized(session, "org/model")
            async with session.get(blob, headers=known) as answer:
                assert await answer.read() == CONTENT
            server.issuer.seconds = -300
            late = await server.authorized(session, "org/model")
            async with session.get(blob, headers=late) as answer:
                assert answer.status == 401
