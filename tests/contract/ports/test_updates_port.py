"""The routes of weight updates over real sockets: parts in, one swap out, and bodies within bounds."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.http import spool
from modelswap_engine.protocol.version import CONTROL_PREFIX
from tests.support.fake_source import FakeCheckpoint
from tests.support.ports import Ports, side_files
from tests.support.tensor_files import packed

UPDATES = f"{CONTROL_PREFIX}/updates"


async def post(ports: Ports, path: str, *, data: Any = None, **body: Any) -> tuple[int, Any]:
    sent = {"data": data} if data is not None else {"json": body}
    async with ports.control.post(UPDATES + path, **sent) as response:
        return response.status, await response.json() if response.status != 204 else None


def bodies(folder: Path) -> list[Path]:
    return list((folder / "state" / "bodies").glob("*"))


async def test_an_update_over_http(ports: Ports, tmp_path: Path) -> None:
    other = ports.publish("1.1", embed=b"E" * 8)
    status, begun = await post(ports, "", updateId="u", owner="trainer", seconds=30)
    assert (status, begun["updateId"], begun["base"]["version"]) == (201, "u", "1.0")
    status, state = await post(ports, "/u/tensors?owner=trainer", data=packed({"norm": b"N" * 2}))
    assert (status, state["tensors"], state["bytes"], state["sources"]) == (200, 1, 2, ["tensor"])
    assert bodies(tmp_path) == []
    status, state = await post(ports, "/u/disk", uri=other.uri, names=["emb*"], owner="trainer")
    assert (status, state["tensors"]) == (200, 2)
    async with ports.control.get(f"{UPDATES}/u") as response:
        assert (await response.json())["sources"] == ["tensor", "disk"]
    async with ports.control.get(f"{CONTROL_PREFIX}/state") as response:
        shown = await response.json()
    assert (shown["update"]["updateId"], shown["live"]["version"]) == ("u", "1.0")
    status, done = await post(ports, "/u/commit", owner="trainer", version="step-1")
    wanted = FakeCheckpoint({"embed": b"E" * 8, "norm": b"N" * 2}, side=side_files())
    assert (status, done["state"], done["target"]["digest"]) == (200, "Serving", wanted.digest)
    assert ports.backend.live == wanted.tensors
    async with ports.control.get(f"{CONTROL_PREFIX}/swaps/u") as response:
        assert (await response.json())["state"] == "Serving"
    async with ports.control.get(f"{UPDATES}/u") as response:
        assert response.status == 404


async def test_abort_over_http(ports: Ports) -> None:
    await post(ports, "", updateId="u")
    await post(ports, "/u/tensors", data=packed({"norm": b"N" * 2}))
    assert (await post(ports, "/u/abort"))[0] == 204
    assert (await post(ports, "/u/abort"))[0] == 404
    assert ports.backend.inbox is None


async def test_a_body_is_read_in_any_number_of_pieces(ports: Ports) -> None:
    await post(ports, "", updateId="u")
    data = packed({"norm": b"N" * 2, "embed": b"E" * 8})

    async def pieces() -> Any:
        for byte in data:
            yield bytes([byte])

    status, state = await post(ports, "/u/tensors", data=pieces())
    assert (status, state["bytes"]) == (200, 10)


@pytest.mark.parametrize(
    "body", [b"", b"\x80\x04.", b"PK\x03\x04aaaaaaaa", b'{"norm": 1}', packed({"norm": b"NN"})[:-1]]
)
async def test_a_body_that_is_no_safetensors_file(ports: Ports, tmp_path: Path, body: bytes) -> None:
    await post(ports, "", updateId="u")
    status, answer = await post(ports, "/u/tensors", data=body)
    assert (status, answer["error"]["code"]) in {(422, "InvalidCheckpoint"), (422, "UnsupportedFormat")}
    assert bodies(tmp_path) == []
    assert (await post(ports, "/u/commit"))[1]["state"] == "Serving"


async def test_a_body_has_bounds(ports: Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await post(ports, "", updateId="u")
    limit = ports.coordinator.updates.largest_part("u")
    monkeypatch.setattr(type(ports.coordinator.updates), "largest_part", lambda *_: 100)
    for data in (b"x" * 101, _endless()):
        status, answer = await post(ports, "/u/tensors", data=data)
        assert (status, answer["error"]["code"]) == (413, "TooLarge")
    assert limit >= 40
    assert bodies(tmp_path) == []


async def test_a_body_that_stops_coming(ports: Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await post(ports, "", updateId="u")
    monkeypatch.setattr(spool, "IDLE_SECONDS", 0.02)
    bearer = ports.control.headers["Authorization"]
    reader, writer = await asyncio.open_connection("127.0.0.1", int(ports.control_url.rpartition(":")[2]))
    head = f"POST {UPDATES}/u/tensors HTTP/1.1\r\nHost: x\r\nAuthorization: {bearer}\r\nContent-Length: 9\r\n\r\nx"
    writer.write(head.encode())
    assert b" 408 " in await reader.readline()
    writer.close()
    assert bodies(tmp_path) == []


async def _endless() -> Any:
    for _ in range(30):
        yield b"x" * 10


async def test_a_disk_that_is_full_says_so(ports: Ports, tmp_path: Path) -> None:
    await post(ports, "", updateId="u")
    (tmp_path / "state" / "bodies").write_bytes(b"in the way")
    status, answer = await post(ports, "/u/tensors", data=packed({"norm": b"N" * 2}))
    assert (status, answer["error"]["code"]) == (503, "Unavailable")
    assert "state directory" in answer["error"]["advice"]
