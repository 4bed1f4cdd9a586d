"""The web server of these tests, and what the proxy does to its answers."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import aiohttp
import pytest
from yarl import URL

from tests.support.servers.faults import (
    Answer,
    Dripping,
    Fault,
    OtherTag,
    Reset,
    Stalled,
    Truncated,
    WholeBody,
    WrongRange,
    redirected,
    throttled,
)
from tests.support.servers.fixtures import Proxied, patience
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.web import BASIC, BEARER, WebServer

pytestmark = pytest.mark.sources

CONTENT = bytes(range(256)) * 16
RANGE = {"Range": "bytes=256-511"}
PART = CONTENT[256:512]


@pytest.fixture
async def session(web_server: WebServer, request: pytest.FixtureRequest) -> AsyncIterator[aiohttp.ClientSession]:
    (web_server.root / "model").mkdir(exist_ok=True)
    (web_server.root / "model" / "a.safetensors").write_bytes(CONTENT)
    trust = ssl.create_default_context(cafile=str(web_server.ca))
    connector, timeout = aiohttp.TCPConnector(ssl=trust), aiohttp.ClientTimeout(sock_read=patience(request))
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as made:
        yield made


@pytest.fixture
def proxy(web_server: WebServer, proxied: Proxied) -> FaultProxy:
    return proxied(web_server.plain_url, tls=web_server.tls)


async def test_ranges_and_tags_of_the_server_itself(web_server: WebServer, session: aiohttp.ClientSession) -> None:
    url = f"{web_server.url}/model/a.safetensors"
    async with session.head(url) as answer:
        tag = answer.headers["ETag"]
    async with session.get(url, headers={**RANGE, "If-Match": tag}) as answer:
        assert (answer.status, answer.headers["Content-Range"]) == (206, f"bytes 256-511/{len(CONTENT)}")
        assert await answer.read() == PART
    async with session.get(url, headers={**RANGE, "If-Match": '"other"'}) as answer:
        assert answer.status == 412
    private = web_server.root / "private"
    private.mkdir(exist_ok=True)
    (private / "a").write_bytes(b"secret")
    for known, status in ((None, 401), ("Bearer wrong", 401), (BASIC, 200), (BEARER, 200)):
        async with session.get(
            f"{web_server.url}/private/a", headers={"Authorization": known} if known else {}
        ) as answer:
            assert answer.status == status


async def test_the_proxy_changes_nothing_by_itself(proxy: FaultProxy, session: aiohttp.ClientSession) -> None:
    async with session.get(URL(f"{proxy.url}/model/a.safetensors?x=1%2F2", encoded=True), headers=RANGE) as answer:
        assert (answer.status, await answer.read()) == (206, PART)
    async with session.head(f"{proxy.url}/model/a.safetensors") as answer:
        assert answer.headers["Content-Length"] == str(len(CONTENT))
    (seen,) = proxy.asked("model")
    assert (seen.path, seen.range, seen.status, seen.sent) == (
        "/model/a.safetensors?x=1%2F2",
        "bytes=256-511",
        206,
        256,
    )
    assert seen.headers["Host"] == proxy.host
    assert proxy.sent() == 256
    proxy.forget()
    assert proxy.sent() == 0


BROKEN: dict[str, tuple[Fault, type[Exception]]] = {
    "truncated": (Truncated(after=100), aiohttp.ClientPayloadError),
    "reset half way": (Reset(after=100), aiohttp.ClientError),
    "reset at once": (Reset(), aiohttp.ClientOSError),
    "stalled half way": (Stalled(after=100), aiohttp.SocketTimeoutError),
    "stalled at once": (Stalled(), aiohttp.SocketTimeoutError),
}


@pytest.mark.parametrize(("fault", "error"), BROKEN.values(), ids=BROKEN)
async def test_answers_that_do_not_end(
    proxy: FaultProxy, session: aiohttp.ClientSession, fault: Fault, error: type[Exception]
) -> None:
    proxy.inject(fault)
    with pytest.raises(error):
        async with session.get(f"{proxy.url}/model/a.safetensors", headers=RANGE) as answer:
            await answer.read()
    assert proxy.sent() == max(getattr(fault, "after", 0), 0)


TURNED = PART[::-1]  # of bytes that rise from 0 to 255, each one inverted

WRONG: dict[str, tuple[Fault, int, str, bytes]] = {
    "other bytes": (WrongRange(shift=2), 206, f"bytes 258-513/{len(CONTENT)}", TURNED),
    "other bytes, denied": (WrongRange(admitted=False), 206, f"bytes 256-511/{len(CONTENT)}", TURNED),
    "range ignored": (WholeBody(), 200, "", bytes(256) + PART + bytes(len(CONTENT) - 512)),
    "in drips": (Dripping(piece=100, seconds=0.01), 206, f"bytes 256-511/{len(CONTENT)}", PART),
}


@pytest.mark.parametrize(("fault", "status", "claimed", "body"), WRONG.values(), ids=WRONG)
async def test_answers_that_are_wrong(
    proxy: FaultProxy, session: aiohttp.ClientSession, fault: Fault, status: int, claimed: str, body: bytes
) -> None:
    proxy.inject(fault)
    async with session.get(f"{proxy.url}/model/a.safetensors", headers=RANGE) as answer:
        assert (answer.status, answer.headers.get("Content-Range", "")) == (status, claimed)
        assert await answer.read() == body
    proxy.heal()
    async with session.get(f"{proxy.url}/model/a.safetensors", headers=RANGE) as answer:
        assert (answer.status, await answer.read()) == (206, PART)


async def test_rules_say_which_requests_and_how_often(proxy: FaultProxy, session: aiohttp.ClientSession) -> None:
    proxy.inject(throttled(503, retry_after="7"), path="safetensors$", skip=1, times=1)
    proxy.inject(OtherTag('"other"'), path="safetensors$", skip=1, times=1)
    proxy.inject(redirected("https://elsewhere.invalid/"), method="HEAD")
    proxy.inject(Answer(418), path="tea")
    url = f"{proxy.url}/model/a.safetensors"
    seen = []
    for _ in range(4):
        async with session.get(url) as answer:
            seen.append((answer.status, answer.headers.get("Retry-After"), answer.headers.get("ETag") == '"other"'))
    assert seen == [(200, None, False), (503, "7", False), (200, None, True), (200, None, False)]
    async with session.head(url, allow_redirects=False) as answer:
        assert (answer.status, answer.headers["Location"]) == (307, "https://elsewhere.invalid/")
    async with session.get(f"{proxy.url}/tea") as answer:
        assert answer.status == 418
