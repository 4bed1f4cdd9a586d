"""Answers that no engine should give: each ends in a typed error within its bound, and the next request is served.

The engine is a socket that a test writes bytes to (see ``tests/support/canned_engine.py``).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.canned_engine import raw_engine
from tests.support.proxy_ports import SERVED, open_proxy

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
GOOD = HEAD + b"Content-Length: 2\r\n\r\n{}"

Writer = asyncio.StreamWriter
ASKED = {"model": SERVED, "prompt": "x"}


async def request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    await reader.readexactly(length)


def says(data: bytes) -> Callable[[Writer], Awaitable[None]]:
    async def write(writer: Writer) -> None:
        writer.write(data)
        await writer.drain()

    return write


async def endless_header(writer: Writer) -> None:
    writer.write(HEAD)
    while True:
        writer.write(b"X-More: " + b"x" * 4000 + b"\r\n")
        await writer.drain()


async def endless_line(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 ")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def endless_interim(writer: Writer) -> None:
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
        await writer.drain()
        await asyncio.sleep(0)


async def stalled(writer: Writer) -> None:
    writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.Event().wait()


HOSTILE = {
    "too short": (says(HEAD + b"Content-Length: 100\r\n\r\n{}"), {"bad_gateway"}),
    "negative length": (says(HEAD + b"Content-Length: -1\r\n\r\n{}"), {"bad_gateway"}),
    "two lengths": (says(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"), {"bad_gateway"}),
    "not HTTP": (says(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), {"bad_gateway"}),
    "nothing": (says(b""), {"WorkerLost"}),
    "half a head": (says(b"HTTP/1.1 200 OK\r\nConte"), {"WorkerLost", "bad_gateway"}),
    "bad chunk": (says(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"), {"bad_gateway"}),
    "endless header": (endless_header, {"bad_gateway"}),
    "endless line": (endless_line, {"bad_gateway"}),
    "endless interim answers": (endless_interim, {"gateway_timeout", "bad_gateway"}),
    "stalled": (stalled, {"gateway_timeout"}),
    "another protocol": (says(SWITCHING), {"WorkerLost"}),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_answer_is_a_typed_error_and_the_next_one_is_served(name: str, tmp_path: Path) -> None:
    attack, codes = HOSTILE[name]
    good = False

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        await request(reader)
        await (says(GOOD) if good else attack)(writer)

    async with (
        raw_engine(serve) as url,
        open_proxy(tmp_path, url, silent_seconds=2.0 if "gateway_timeout" in codes else 60.0) as proxy,
        asyncio.timeout(60),
    ):
        response = await proxy.data.post("/v1/completions", json={"model": SERVED, "prompt": "x"})
        assert response.status in (502, 503, 504)
        assert (await response.json())["error"]["code"] in codes
        assert proxy.flights.running() == 0
        good = True
        assert (await proxy.data.post("/v1/completions", json={"model": SERVED, "prompt": "x"})).status == 200


async def test_more_than_its_length_is_never_the_next_answer(tmp_path: Path) -> None:
    """What follows an answer on its connection would be taken for the answer to the next request."""
    smuggled = HEAD + b'Content-Length: 12\r\n\r\n{"evil":true}'

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        while True:
            await request(reader)
            writer.write(GOOD + smuggled)
            await writer.drain()

    async with raw_engine(serve) as url, open_proxy(tmp_path, url) as proxy, asyncio.timeout(60):
        for _ in range(5):
            response = await proxy.data.post("/v1/completions", json={"model": SERVED, "prompt": "x"})
            assert b"evil" not in await response.read()


@pytest.mark.parametrize("unasked", [HEAD + b'Content-Length: 12\r\n\r\n{"evil":true}', HEAD], ids=["whole", "begun"])
async def test_what_comes_unasked_ends_its_connection(unasked: bytes, tmp_path: Path) -> None:
    """An answer that comes while nobody asks anything would be taken for the answer to the next request."""
    late, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        await request(reader)
        writer.write(GOOD)
        if closed.is_set():
            return
        await late.wait()
        writer.write(unasked)
        assert not await reader.read(1)
        closed.set()

    async with (
        raw_engine(serve) as url,
        open_proxy(tmp_path, url, idle_seconds=600) as proxy,
        asyncio.timeout(20),
    ):
        assert await (await proxy.data.post("/v1/completions", json=ASKED)).read() == b"{}"
        late.set()
        await closed.wait()
        assert await (await proxy.data.post("/v1/completions", json=ASKED)).read() == b"{}"


@pytest.mark.parametrize(
    ("last_words", "asked", "status"), [(b"", 3, 200), (b"HTTP/1.1 2", 2, 503)], ids=["nothing", "a part of a head"]
)
async def test_a_request_is_sent_again_only_where_nothing_of_an_answer_came(
    last_words: bytes, asked: int, status: int, tmp_path: Path
) -> None:
    """The engine closes a kept connection just as it is used."""
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        nonlocal requests
        while True:
            await request(reader)
            requests += 1
            if requests == 2:
                writer.write(last_words)
                return
            writer.write(GOOD)

    async with raw_engine(serve) as url, open_proxy(tmp_path, url) as proxy, asyncio.timeout(20):
        assert (await proxy.data.post("/v1/completions", json=ASKED)).status == 200
        assert (await proxy.data.post("/v1/completions", json=ASKED)).status == status
        assert requests == asked


async def test_a_request_is_not_sent_again_where_its_connection_was_new(tmp_path: Path) -> None:
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        nonlocal requests
        await request(reader)
        requests += 1

    async with raw_engine(serve) as url, open_proxy(tmp_path, url) as proxy, asyncio.timeout(20):
        response = await proxy.data.post("/v1/completions", json=ASKED)
        assert (await response.json())["error"]["code"] == "WorkerLost"
        assert requests == 1


async def test_an_answer_before_the_request_is_whole_is_passed_on_and_ends_its_connection(tmp_path: Path) -> None:
    """What the engine has not read of a request would be read as the next one."""
    connections, size = 0, 8 << 20

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if connections > 1:
            writer.write(GOOD)
            return
        writer.write(HEAD.replace(b"200 OK", b"413 Too Large") + b"Content-Length: 2\r\n\r\n{}")
        await writer.drain()
        await asyncio.Event().wait()

    async with (
        raw_engine(serve) as url,
        open_proxy(tmp_path, url, max_body=2 * size) as proxy,
        asyncio.timeout(20),
    ):
        response = await proxy.data.post("/v1/completions", json=ASKED | {"prompt": "x" * size})
        assert (response.status, await response.read()) == (413, b"{}")
        assert (await proxy.data.post("/v1/completions", json=ASKED)).status == 200
        assert connections == 2


async def test_an_interim_answer_is_not_the_answer(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + GOOD)

    async with raw_engine(serve) as url, open_proxy(tmp_path, url) as proxy, asyncio.timeout(20):
        response = await proxy.data.post("/v1/completions", json=ASKED)
        assert (response.status, await response.read()) == (200, b"{}")


async def test_an_answer_without_a_length_ends_with_its_connection(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        await request(reader)
        writer.write(HEAD + b"\r\n{}")

    async with raw_engine(serve) as url, open_proxy(tmp_path, url) as proxy, asyncio.timeout(20):
        for _ in range(2):
            response = await proxy.data.post("/v1/completions", json=ASKED)
            assert (response.status, await response.read()) == (200, b"{}")


@pytest.mark.parametrize(
    "ending",
    [b"", b"5\r\ndata:\r\n", b"zz\r\n", b"ffffffffffffffff\r\n", b"5\r\ndata:\r\n0\r\n\r\n"],
    ids=["closed", "half an event", "bad chunk", "huge chunk", "event without an end"],
)
async def test_a_stream_that_ends_wrongly_says_so_or_is_whole(ending: bytes, tmp_path: Path) -> None:
    first, arrived = b'data: {"a":1}\n\n', asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        await request(reader)
        writer.write(EVENTS + f"{len(first):x}".encode() + b"\r\n" + first + b"\r\n")
        await arrived.wait()
        writer.write(ending)
        await writer.drain()

    async with raw_engine(serve) as url, open_proxy(tmp_path, url) as proxy, asyncio.timeout(60):
        response = await proxy.data.post("/v1/completions", json={"model": SERVED, "prompt": "x", "stream": True})
        assert await response.content.readuntil(b"\n\n") == first
        arrived.set()
        events = [item for item in (await response.text()).split("\n\n") if item]
        if ending.endswith(b"0\r\n\r\n"):
            assert events == ["data:"]
        else:
            error = json.loads(events[0].removeprefix("data: "))["error"]
            assert (error["code"], error["retryable"]) == ("bad_gateway", True)
            assert events[1:] == ["data: [DONE]"]
        assert proxy.flights.running() == 0


async def test_an_event_without_an_end_takes_bounded_memory(tmp_path: Path) -> None:
    size, sent = 64 << 20, 0

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        nonlocal sent
        await request(reader)
        writer.write(EVENTS)
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        while sent < size:
            writer.write(piece)
            await writer.drain()
            sent += 0x10000
        writer.write(b"0\r\n\r\n")

    async with raw_engine(serve) as url, open_proxy(tmp_path, url, silent_seconds=5.0) as proxy, asyncio.timeout(60):
        response = await proxy.data.post("/v1/completions", json={"model": SERVED, "prompt": "x", "stream": True})
        received = 0
        while piece := await response.content.read(1 << 20):
            received += len(piece)
            # What was sent and has not arrived is in buffers: of the sockets, the proxy and this client.
            assert sent - received < 16 << 20
        assert received == size
