"""SGLang's routes for process groups, and for weights that leave or are looked at."""

from typing import Any, Final

from aiohttp import web

from modelswap_engine.http.bodies import json_response, read_body
from modelswap_engine.http.compat import sglang_bodies as bodies
from modelswap_engine.http.compat.sglang_answers import done
from modelswap_engine.http.compat.sglang_weights import as_uri
from modelswap_engine.protocol.codec import decode, encode
from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.protocol.transfers import (
    DEFAULT_SHARD_BYTES,
    JoinGroupRequest,
    ReadRequest,
    SaveRequest,
    SendRequest,
)
from modelswap_engine.swap.coordinator import Coordinator

_MOST_DIGITS: Final = 18


class ExportRoutes:
    """Handlers of these routes."""

    def __init__(self, *, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._export = coordinator.export

    async def init_group(self, request: web.Request) -> web.Response:
        """Meet a trainer; this engine's ranks take the places from ``rank_offset`` on."""
        body = await read_body(request, bodies.InitGroup)
        await self._export.join(
            _joining(
                body.group_name,
                address=body.master_address,
                port=body.master_port,
                rank=body.rank_offset,
                size=body.world_size,
                backend=body.backend,
            )
        )
        return done("Succeeded to initialize custom process group.")

    async def destroy_group(self, request: web.Request) -> web.Response:
        """Leave a group."""
        await self._export.leave((await read_body(request, bodies.DestroyGroup)).group_name)
        return done("Succeeded to destroy custom process group.")

    async def init_send_group(self, request: web.Request) -> web.Response:
        """Meet an engine that is to get these weights."""
        body = await read_body(request, bodies.InitSendGroup)
        await self._export.join(
            _joining(
                send_group(body.group_name, body.ports),
                address=body.master_address,
                port=body.ports,
                rank=body.group_rank,
                size=body.world_size,
                backend=body.backend,
                sends=True,
            )
        )
        return done("Succeeded to init group.")

    async def send(self, request: web.Request) -> web.Response:
        """Send the live weights to it; the group ends with that, as there."""
        body = await read_body(request, bodies.Send)
        group = send_group(body.group_name, body.ports)
        result = await self._export.send(group, SendRequest())
        await self._export.leave(group)
        return done("Succeeded to send weights.", digest=result.digest)

    async def by_name(self, request: web.Request) -> web.Response:
        """Show the first rows of one tensor, nested as its shape is."""
        if request.method == "GET":
            body = decode(encode({key: _plain(value) for key, value in request.query.items()}), bodies.ByName)
        else:
            body = await read_body(request, bodies.ByName)
        found = await self._export.read(ReadRequest(name=body.name, rows=body.truncate_size))
        return json_response(_nested(found.numbers, found.shape))

    async def save_sharded(self, request: web.Request) -> web.Response:
        """Write the live version to a folder, in files of bounded size."""
        body = await read_body(request, bodies.SaveSharded)
        return await self._save(body.path, body.max_size or DEFAULT_SHARD_BYTES)

    async def save_remote(self, request: web.Request) -> web.Response:
        """Write the live version to a URI."""
        return await self._save((await read_body(request, bodies.SaveRemote)).url, DEFAULT_SHARD_BYTES)

    async def _save(self, place: str, shard_bytes: int) -> web.Response:
        result = await self._export.save(SaveRequest(uri=as_uri(place), shard_bytes=shard_bytes))
        return done("Success.", digest=result.digest, files=result.files)


def send_group(name: str, ports: str) -> str:
    """Return the name that SGLang gives the group of rank 0: one group for each rank, by its port."""
    return f"{name}_{_first(ports)}_0"


def _first(ports: str | int) -> int:
    port = _plain(ports.partition(",")[0].strip()) if isinstance(ports, str) else ports
    if isinstance(port, str):
        raise BadRequest(f"{port[:80]!r} is no port", advice="send a number")
    return port


def _plain(text: str) -> int | str:
    """Return the number that a text is, else the text; no number here has more than a few digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else text


def _joining(
    group: str, *, address: str, port: str | int, rank: int, size: int, backend: str, sends: bool = False
) -> JoinGroupRequest:
    fields = {
        "group": group,
        "address": address,
        "port": _first(port),
        "rank": rank,
        "size": size,
        "backend": backend,
        "sends": sends,
    }
    return decode(encode(fields), JoinGroupRequest)


def _nested(numbers: list[float], shape: list[int]) -> Any:
    if not shape:
        return numbers[0]
    if len(shape) == 1:
        return numbers
    step = len(numbers) // shape[0] if shape[0] else 0
    return [_nested(numbers[begin : begin + step], shape[1:]) for begin in range(0, len(numbers), step or 1)]
