"""Sources that are reached through a forward proxy only: what is asked through it, what is not, and what it may do."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from socket import AF_INET, AF_INET6, AddressFamily

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from modelswap_engine.protocol.errors import SourceNotAllowed, SourceUnreadable
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.objects import ObjectStores
from modelswap_engine.sources.web.proxies import Proxies
from modelswap_engine.sources.web.reach import Reach
from tests.support.pki import write_pair
from tests.support.servers.connect import ConnectProxy, connect_proxy
from tests.support.servers.faults import redirected
from tests.support.servers.fixtures import Proxied
from tests.support.servers.places import Place, WebPlace
from tests.support.servers.s3 import KEY, REGION, SECRET, S3Server
from tests.support.servers.web import WebServer

pytestmark = pytest.mark.sources

NAME = "model.safetensors"
CONTENT = bytes(range(256))
HOST = "models.acme.test"
"""No resolver knows it; the proxy does."""


@pytest.fixture
async def edge() -> AsyncIterator[ConnectProxy]:
    async with connect_proxy() as proxy:
        yield proxy


def through(place: Place, proxy: ConnectProxy, **more: str) -> None:
    """Let the place be asked as the environment says."""
    proxies = Proxies({"HTTPS_PROXY": proxy.url, "http_proxy": proxy.url} | more)
    place.settings = replace(place.settings, proxies=proxies)


async def content(place: Place, *, uri: str = "") -> bytes:
    folder = await place.opener.open(uri or place.uri, credentials="reader")
    try:
        stat = (await folder.files([NAME]))[NAME]
        return b"".join([bytes(piece) async for piece in folder.stream(NAME, 0, stat.size, stat=stat)])
    finally:
        await folder.close()


async def test_each_kind_of_server_is_asked_through_it_and_only_through_it(place: Place, edge: ConnectProxy) -> None:
    through(place, edge)
    await place.upload({NAME: CONTENT})
    assert await content(place) == CONTENT
    assert place.proxy.host.replace("127.0.0.1", "localhost") in {
        name.replace("127.0.0.1", "localhost") for name in edge.seen
    }
    edge.seen.clear()
    through(place, edge, NO_PROXY="10.0.0.0/8, 127.0.0.0/8,localhost")
    assert await content(place) == CONTENT
    assert edge.seen == []


@pytest.fixture
def far(web_place: WebPlace, web_server: WebServer, proxied: Proxied, edge: ConnectProxy, tmp_path: Path) -> str:
    """The URI of the folder at a name that only the proxy knows."""
    pair = write_pair(web_server.authority, tmp_path / "far", HOST)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)
    web_place.proxy = proxied(web_server.plain_url, tls=tls)
    edge.names[f"{HOST}:443"] = int(web_place.proxy.host.rpartition(":")[2])
    return f"https://{HOST}/{web_place.name}"


async def test_a_name_that_only_the_proxy_knows_and_a_password_that_only_it_gets(
    web_place: WebPlace, far: str, edge: ConnectProxy
) -> None:
    await web_place.upload({NAME: CONTENT})
    edge.known = "Basic dGVzdGVyOm5vdC1hLXNlY3JldA=="
    through(web_place, edge, HTTPS_PROXY=edge.url.replace("//", "//tester:not-a-secret@"))
    assert await content(web_place, uri=far) == CONTENT
    assert set(edge.seen) == {f"{HOST}:443"}
    assert not any("Proxy-Authorization" in seen.headers for seen in web_place.proxy.seen)


async def test_a_proxy_that_refuses_is_told_without_its_password(
    web_place: WebPlace, far: str, edge: ConnectProxy
) -> None:
    edge.known = "Basic other"
    through(web_place, edge, HTTPS_PROXY=edge.url.replace("//", "//tester:not-a-secret@"))
    with pytest.raises(SourceUnreadable, match=f"{HOST}.*the proxy refuses it") as caught:
        await content(web_place, uri=far)
    assert "not-a-secret" not in str(caught.value)
    through(web_place, edge, HTTPS_PROXY="http://127.0.0.1:9")
    with pytest.raises(SourceUnreadable, match="no connection to the proxy"):
        await content(web_place, uri=far)


@pytest.mark.parametrize("there", ["169.254.169.254", "10.0.0.1", "localhost"])
async def test_what_can_be_seen_to_be_private_is_not_asked_through_it(
    web_place: WebPlace, far: str, edge: ConnectProxy, there: str
) -> None:
    through(web_place, edge)
    web_place.settings = replace(web_place.settings, reach=Reach())
    await web_place.upload({NAME: CONTENT})
    web_place.proxy.inject(redirected(f"https://{there}/{NAME}"))
    with pytest.raises(SourceNotAllowed, match=f"{there} leads to"):
        await content(web_place, uri=far)
    assert set(edge.seen) == {f"{HOST}:443"}


class SixOnly(AbstractResolver):
    """Knows a name that has no address but one of IPv6."""

    async def resolve(self, host: str, port: int = 0, family: AddressFamily = AF_INET) -> list[ResolveResult]:
        if host != "six.acme.test" or family is AF_INET:
            raise OSError("no such name, or no such address")
        return [ResolveResult(hostname=host, host="fd00:ec2::254", port=port, family=AF_INET6, proto=0, flags=0)]

    async def close(self) -> None:
        return


async def test_addresses_of_both_kinds_are_looked_at(web_place: WebPlace, far: str, edge: ConnectProxy) -> None:
    through(web_place, edge)
    web_place.settings = replace(web_place.settings, reach=Reach(), resolver=SixOnly())
    await web_place.upload({NAME: CONTENT})
    web_place.proxy.inject(redirected(f"https://six.acme.test/{NAME}"))
    with pytest.raises(SourceNotAllowed, match=r"six\.acme\.test leads to private address fd00:ec2::254"):
        await content(web_place, uri=far)


async def test_object_stores_look_at_the_same_variables(
    s3_server: S3Server,
    web_server: WebServer,
    proxied: Proxied,
    edge: ConnectProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tls = proxied(s3_server.url, tls=web_server.tls)
    bucket = s3_server.bucket("behind-a-proxy")
    settings = {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION, "AWS_ENDPOINT": tls.url,
        "ca.crt": web_server.ca.read_text(),
    }  # fmt: skip
    for key, value in settings.items():
        (tmp_path / "reader").mkdir(exist_ok=True)
        (tmp_path / "reader" / key).write_text(value)
    stores = ObjectStores(Credentials(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", edge.url)
    folder = await stores.open(f"s3://{bucket}/chat", credentials="reader")
    assert await folder.files([NAME]) == {}
    assert edge.seen == [tls.host]
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
    folder = await stores.open(f"s3://{bucket}/chat", credentials="reader")
    assert await folder.files([NAME]) == {}
    assert edge.seen == [tls.host]
