"""Credentials as they are mounted, on real servers: who may read, what is sent to whom, what is told."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelswap_engine.protocol.errors import (
    CredentialsNotMounted,
    InvalidCheckpoint,
    SourceDenied,
    SourceNotAllowed,
    SourceNotFound,
    SourceUnreadable,
    UnsupportedFormat,
)
from modelswap_engine.sources.remote.port import FileStat, Folder
from modelswap_engine.sources.web.reach import Reach
from tests.support.servers.faults import Answer, Truncated, redirected
from tests.support.servers.fixtures import Proxied
from tests.support.servers.places import HubPlace, Place, RegistryPlace, WebPlace, elsewhere
from tests.support.servers.registry import PASSWORD, USER, Layer, RegistryServer
from tests.support.servers.web import WebServer
from tests.support.tars import packed

pytestmark = pytest.mark.sources

NAME = "model.safetensors"
CONTENT = bytes(range(256))


async def content(place: Place) -> bytes:
    folder = await place.open()
    try:
        return await part(folder, (await folder.files([NAME]))[NAME])
    finally:
        await folder.close()


async def part(folder: Folder, stat: FileStat) -> bytes:
    return b"".join([bytes(piece) async for piece in folder.stream(NAME, 0, stat.size, stat=stat)])


async def test_credentials_that_are_not_mounted_are_refused_by_name(place: Place) -> None:
    with pytest.raises(CredentialsNotMounted, match="'other'"):
        await place.opener.open(place.uri, credentials="other")


async def test_a_web_server_takes_a_password_or_a_token(web_place: WebPlace) -> None:
    web_place.name = "private"
    await web_place.upload({NAME: CONTENT})
    with pytest.raises(SourceDenied, match="status 401"):
        await content(web_place)
    web_place.mount(username=USER, password=PASSWORD)
    assert await content(web_place) == CONTENT
    web_place.mount(token="wrong")
    with pytest.raises(SourceDenied) as caught:
        await content(web_place)
    assert "wrong" not in str(caught.value)
    web_place.mount(token=PASSWORD)
    assert await content(web_place) == CONTENT


async def test_an_authority_that_is_not_trusted(web_place: WebPlace) -> None:
    await web_place.upload({NAME: CONTENT})
    folder = await web_place.opener.open(web_place.uri, credentials="")
    with pytest.raises(SourceUnreadable, match="not of an authority that is trusted") as caught:
        await folder.files([NAME])
    await folder.close()
    assert "ca.crt" in caught.value.advice
    assert not web_place.pauses


async def test_what_is_not_there(place: Place) -> None:
    if isinstance(place, WebPlace):
        folder = await place.open()
        assert await folder.files([NAME]) == {}
        await folder.close()
        return
    with pytest.raises((SourceNotFound, SourceDenied), match="not there"):
        await place.open()


async def test_a_hub_tells_what_is_private_and_gated(hub_place: HubPlace) -> None:
    await hub_place.upload({NAME: CONTENT})
    hub_place.hub.repository(hub_place.name).private = True
    assert await content(hub_place) == CONTENT
    hub_place.mount(HF_TOKEN="hf_expired")
    with pytest.raises(SourceDenied, match="private, gated or not there") as caught:
        await content(hub_place)
    assert "hf_expired" not in str(caught.value)
    hub_place.hub.repository(hub_place.name).private = False
    hub_place.hub.repository(hub_place.name).gated = True
    hub_place.mount(HF_TOKEN="hf_not-a-secret")
    with pytest.raises(SourceDenied, match="status 403"):
        await content(hub_place)


@pytest.fixture(params=["password", "token"])
def guarded(
    request: pytest.FixtureRequest, web_server: WebServer, proxied: Proxied, tmp_path: Path
) -> Iterator[RegistryPlace]:
    with contextlib.closing(RegistryServer(tmp_path / "registry", access=request.param)) as server:
        place = RegistryPlace(proxy=proxied(server.url), mounted=tmp_path / "mounted", registry=server)
        # Its token service has no TLS, so neither has what is before it.
        place.mount(OCI_PLAIN_HTTP="true")
        yield place


async def test_a_registry_takes_the_secret_that_images_are_pulled_with(guarded: RegistryPlace) -> None:
    await guarded.upload({NAME: CONTENT})
    with pytest.raises(SourceDenied, match="status 401"):
        await content(guarded)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    logins = {"other": {"auth": "x"}, f"https://{guarded.proxy.host}/v1/": {"auth": auth}}
    guarded.mount(**{".dockerconfigjson": json.dumps({"auths": logins})})
    assert await content(guarded) == CONTENT
    guarded.mount(username=USER, password="wrong")
    with pytest.raises(SourceDenied) as caught:
        await content(guarded)
    assert "wrong" not in str(caught.value)
    assert base64.b64encode(f"{USER}:wrong".encode()).decode() not in str(caught.value)
    if guarded.registry.issuer is not None:
        assert set(guarded.registry.issuer.asked[1:]) == {f"repository:{guarded.name}:pull"}


async def test_a_token_whose_time_is_over_is_bought_anew(guarded: RegistryPlace) -> None:
    await guarded.upload({NAME: CONTENT})
    guarded.mount(username=USER, password=PASSWORD)
    issuer = guarded.registry.issuer
    if issuer is None:
        assert await content(guarded) == CONTENT
        return
    folder = await guarded.open()
    stat = (await folder.files([NAME]))[NAME]
    count = len(issuer.asked)
    guarded.proxy.inject(Answer(401, issuer.challenge), times=1)
    assert await part(folder, stat) == CONTENT
    assert len(issuer.asked) == count + 1
    issuer.seconds = -300
    guarded.proxy.inject(Answer(401, issuer.challenge), times=1)
    with pytest.raises(SourceDenied):
        await part(folder, stat)
    await folder.close()


async def test_compressed_archives_are_refused_with_what_to_do(registry_place: RegistryPlace) -> None:
    archive = Layer(content=b"tar", media_type="application/vnd.kitops.modelkit.model.v1.tar+gzip")
    await registry_place.registry.push(registry_place.name, "1.0", [archive])
    with pytest.raises(UnsupportedFormat, match=r"compressed archives.*model\.v1\.tar\+gzip") as caught:
        await registry_place.open()
    assert "modctl build" in caught.value.advice


@pytest.mark.parametrize("folder", ["", "out/chat/"])
async def test_files_in_an_uncompressed_archive_are_read_by_ranges(registry_place: RegistryPlace, folder: str) -> None:
    big = bytes(range(256)) * 4096
    files = {"other/README.md": b"x", f"{folder}config.json": b"{}", f"{folder}{NAME}": big, f"{folder}x/y.json": b"[]"}
    archive = Layer(content=packed(files), media_type="application/vnd.kitops.modelkit.model.v1.tar")
    code = Layer(content=b"no archive", media_type="application/vnd.kitops.modelkit.code.v1.tar")
    await registry_place.registry.push(registry_place.name, "1.0", [archive, code])
    opened = await registry_place.open()
    found = await opened.files([])
    assert {name: stat.size for name, stat in found.items()} == {"config.json": 2, NAME: len(big)}
    assert registry_place.proxy.sent("blobs") < 100_000, "headers alone"
    registry_place.proxy.inject(Truncated(after=1000), path="blobs", times=1)
    pieces = [bytes(piece) async for piece in opened.stream(NAME, 70_000, 80_000, stat=found[NAME])]
    assert b"".join(pieces) == big[70_000:80_000]
    assert await part(opened, found[NAME]) == big
    await opened.close()


async def test_an_archive_that_is_none_and_weights_in_two_folders(registry_place: RegistryPlace) -> None:
    kind = "application/vnd.cncf.model.weight.v1.tar"
    for content, error, match in (
        (gzip.compress(packed({NAME: CONTENT})), InvalidCheckpoint, "not an uncompressed tar archive"),
        (packed({f"a/{NAME}": CONTENT, f"b/{NAME}": CONTENT}), UnsupportedFormat, "several folders: a, b"),
    ):
        await registry_place.registry.push(registry_place.name, "1.0", [Layer(content=content, media_type=kind)])
        folder = await registry_place.open()
        with pytest.raises(error, match=match):
            await folder.files([NAME])
        await folder.close()


async def test_a_manifest_is_what_its_digest_names(registry_place: RegistryPlace) -> None:
    layer = Layer(content=CONTENT, annotations={"org.opencontainers.image.title": NAME})
    digest = await registry_place.registry.push(registry_place.name, "1.0", [layer])
    await registry_place.registry.push(registry_place.name, "1.1", [])
    base = registry_place.uri.removesuffix(":1.0")
    for uri in (f"{base}:1.1@{digest}", f"{base}@{digest}"):
        folder = await registry_place.opener.open(uri, credentials="reader")
        assert list(await folder.files([])) == [NAME]
        assert folder.uri == f"{base}@{digest}"
        await folder.close()
    other = redirected(f"/v2/{registry_place.name}/manifests/1.1")
    registry_place.proxy.inject(other, path=digest)
    with pytest.raises(SourceUnreadable, match="hashes to sha256:"):
        await registry_place.opener.open(f"{base}@{digest}", credentials="reader")


REACHES = {"public addresses only": Reach(), "all": Reach(anywhere=True), "that host": Reach(frozenset({"localhost"}))}


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
async def test_where_a_server_sends_to_a_private_address(hub_place: HubPlace, reach: Reach) -> None:
    await hub_place.upload({NAME: CONTENT})
    elsewhere(hub_place, reach)
    if reach != Reach():
        assert await content(hub_place) == CONTENT
        return
    with pytest.raises(SourceNotAllowed, match="localhost leads to loopback address") as caught:
        await content(hub_place)
    assert "--allow-source" in caught.value.advice
    assert not hub_place.proxy.seen, "it was not even asked"


async def test_another_origin_gets_no_credentials(web_place: WebPlace, web_server: WebServer, proxied: Proxied) -> None:
    web_place.name = "private"
    await web_place.upload({NAME: CONTENT})
    web_place.mount(token=PASSWORD)
    other = proxied(web_server.plain_url, tls=web_server.tls)
    web_place.proxy.inject(redirected(f"{other.url}/private/{NAME}"))
    with pytest.raises(SourceDenied):
        await content(web_place)
    assert {"Authorization" in seen.headers for seen in web_place.proxy.seen} == {True}
    assert {"Authorization" in seen.headers for seen in other.seen} == {False}


async def test_nobody_is_sent_away_from_tls(web_place: WebPlace, web_server: WebServer) -> None:
    await web_place.upload({NAME: CONTENT})
    web_place.proxy.inject(redirected(f"{web_server.plain_url}/{web_place.name}/{NAME}"))
    with pytest.raises(SourceNotAllowed, match="not https"):
        await content(web_place)
