"""What a client of S3 sees through the proxy, of a real server and of faults: the table of `servers/s3.py`."""

from __future__ import annotations

import itertools
from pathlib import Path

import obstore
import pytest
from obstore import exceptions
from obstore.store import S3Store

from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.objects import ObjectSettings, ObjectStores
from tests.support.servers.faults import (
    Answer,
    Fault,
    OtherTag,
    Reset,
    Stalled,
    Truncated,
    WholeBody,
    WrongRange,
    expired,
    forbidden,
    redirected,
    throttled,
)
from tests.support.servers.fixtures import Proxied, patience
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.s3 import KEY, REGION, SECRET, S3Server
from tests.support.servers.web import WebServer

pytestmark = pytest.mark.sources

KIB = 1024
START, STOP = 256, 256 + 512 * KIB
CONTENT = bytes(range(256)) * (4 * KIB)
_numbers = itertools.count(1)


class Bucket:
    """One object in a bucket of its own, read through a proxy."""

    def __init__(self, server: S3Server, proxy: FaultProxy, *, stall: float) -> None:
        self.proxy = proxy
        self.name = server.bucket(f"bucket-{next(_numbers)}")
        self.direct = server.store(self.name)
        self.store: S3Store = server.store(self.name, endpoint=proxy.url, stall=stall)


@pytest.fixture
async def bucket(s3_server: S3Server, proxied: Proxied, request: pytest.FixtureRequest) -> Bucket:
    made = Bucket(s3_server, proxied(s3_server.url), stall=patience(request))
    await obstore.put_async(made.direct, "model.safetensors", CONTENT)
    return made


async def test_signed_requests_pass_and_are_counted(bucket: Bucket) -> None:
    await obstore.put_async(bucket.store, "other", b"abc")
    head = await obstore.head_async(bucket.store, "model.safetensors")
    whole = await obstore.get_async(bucket.store, "model.safetensors", options={"if_match": head["e_tag"]})
    part = await obstore.get_range_async(bucket.store, "model.safetensors", start=1000, end=3000)
    assert bytes(await whole.bytes_async()) == CONTENT
    assert bytes(part) == CONTENT[1000:3000]
    assert bucket.proxy.sent("model") == len(CONTENT) + 2000
    assert [seen.range for seen in bucket.proxy.asked("model")] == ["", "bytes=1000-2999"]
    assert len(bucket.proxy.asked("other", method="PUT")) == 1


async def test_a_replaced_object_is_refused_by_its_tag(bucket: Bucket) -> None:
    head = await obstore.head_async(bucket.store, "model.safetensors")
    await obstore.put_async(bucket.direct, "model.safetensors", CONTENT[::-1])
    with pytest.raises(exceptions.PreconditionError):
        await obstore.get_async(bucket.store, "model.safetensors", options={"if_match": head["e_tag"]})


async def read(bucket: Bucket) -> bytes:
    head = await obstore.head_async(bucket.direct, "model.safetensors")
    answer = await obstore.get_async(
        bucket.store, "model.safetensors", options={"if_match": head["e_tag"], "range": (START, STOP)}
    )
    return b"".join([bytes(piece) async for piece in answer.stream()])


PASSING: dict[str, Fault] = {
    "truncated": Truncated(after=100_000),
    "reset half way": Reset(after=100_000),
    "reset at once": Reset(),
    "stalled half way": Stalled(after=100_000),
    "stalled at once": Stalled(),
    "too many requests": throttled(429, retry_after="3600"),
    "unavailable": throttled(503, retry_after="3600"),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
async def test_what_passes_is_asked_again_from_where_it_was_on(bucket: Bucket, fault: Fault) -> None:
    bucket.proxy.inject(fault, times=1)
    assert await read(bucket) == CONTENT[START:STOP]
    first, second = bucket.proxy.asked()
    assert second.range == f"bytes={START + first.sent if first.status == 206 else START}-{STOP - 1}"
    assert second.headers["If-Match"] == first.headers["If-Match"]


LASTING: dict[str, tuple[Fault, type[Exception], str]] = {
    "truncated": (Truncated(after=1000), exceptions.GenericError, "body error"),
    "reset": (Reset(), exceptions.GenericError, "after 2 retries"),
    "unavailable": (throttled(503), exceptions.GenericError, "after 2 retries.*503"),
    "wrong range": (WrongRange(), exceptions.GenericError, "Requested 256.*got 257"),
    "range ignored": (WholeBody(), exceptions.GenericError, "non-partial response"),
    "expired": (expired(), exceptions.GenericError, "ExpiredToken"),
    "forbidden": (forbidden(), exceptions.PermissionDeniedError, "403"),
    "not known": (Answer(401), exceptions.UnauthenticatedError, "401"),
    "not there": (Answer(404), FileNotFoundError, "404"),
}


@pytest.mark.parametrize(("fault", "error", "text"), LASTING.values(), ids=LASTING)
async def test_what_lasts_is_an_error(bucket: Bucket, fault: Fault, error: type[Exception], text: str) -> None:
    bucket.proxy.inject(fault)
    with pytest.raises(error, match=text) as caught:
        await read(bucket)
    assert SECRET not in str(caught.value)


async def test_replaced_half_way(bucket: Bucket) -> None:
    bucket.proxy.inject(Truncated(after=100_000), times=1)
    bucket.proxy.inject(Answer(412))
    with pytest.raises(exceptions.GenericError, match="precondition failure"):
        await read(bucket)


async def test_what_is_not_noticed(bucket: Bucket) -> None:
    bucket.proxy.inject(WrongRange(admitted=False), times=1)
    assert await read(bucket) == bytes(255 - value for value in CONTENT[START:STOP])
    bucket.proxy.inject(OtherTag(), times=1)
    assert await read(bucket) == CONTENT[START:STOP]


async def test_redirects_are_followed_anywhere_without_the_signature(bucket: Bucket, proxied: Proxied) -> None:
    elsewhere = proxied(bucket.proxy.url)
    elsewhere.inject(Answer(200, {"ETag": '"x"', "Last-Modified": "Mon, 30 Nov 2026 12:00:00 GMT"}, b"elsewhere"))
    bucket.proxy.inject(redirected(f"{elsewhere.url}/anything"))
    answer = await obstore.get_async(bucket.store, "model.safetensors")
    assert bytes(await answer.bytes_async()) == b"elsewhere"
    (seen,) = elsewhere.asked("/anything")
    assert "Authorization" not in seen.headers
    assert "x-amz-date" in seen.headers


async def test_redirects_from_https_are_followed_to_https_alone(
    bucket: Bucket, proxied: Proxied, web_server: WebServer, tmp_path: Path
) -> None:
    secure, elsewhere = proxied(bucket.proxy.url, tls=web_server.tls), proxied(bucket.proxy.url)
    secure.inject(redirected(f"{elsewhere.url}/anything"))
    settings = {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION, "AWS_ENDPOINT": secure.url,
        "ca.crt": web_server.ca.read_text(),
    }  # fmt: skip
    (tmp_path / "reader").mkdir()
    for key, value in settings.items():
        (tmp_path / "reader" / key).write_text(value)
    stores = ObjectStores(Credentials(tmp_path), settings=ObjectSettings(retries=0))
    folder = await stores.open(f"s3://{bucket.name}", credentials="reader")
    with pytest.raises(SourceUnreadable):
        await folder.files([])
    assert len(secure.seen) == 1
    assert elsewhere.seen == []
