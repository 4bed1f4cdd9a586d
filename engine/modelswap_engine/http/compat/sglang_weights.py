"""SGLang's routes that bring weights: each is a part of the trainer's one transaction."""

import asyncio
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from modelswap_engine.http.bodies import read_body, read_large
from modelswap_engine.http.compat.session import OWNER, TrainerSession
from modelswap_engine.http.compat.sglang_answers import done
from modelswap_engine.http.compat.sglang_bodies import FromDisk, FromDistributed, FromIpc, FromTensor, Selected
from modelswap_engine.http.compat.tensors import announced, unpacked
from modelswap_engine.http.spool import Spool
from modelswap_engine.http.updates import MAX_NAMES_BYTES
from modelswap_engine.protocol.errors import BadRequest, UnsupportedChange
from modelswap_engine.protocol.updates import BroadcastPart, DiskPart, SharedPart, SharedTensor
from modelswap_engine.swap.coordinator import Coordinator

MAX_BASE64_BYTES: Final = 256 * 1024 * 1024
BODY: Final = "application/octet-stream"
_OWN_FORMATS: Final = frozenset({"", "auto", "safetensors", "direct", "flattened_bucket"})


class WeightRoutes:
    """Handlers of the routes that bring weights."""

    def __init__(self, *, coordinator: Coordinator, session: TrainerSession, spool: Spool) -> None:
        self._coordinator = coordinator
        self._session = session
        self._spool = spool

    async def begin(self, request: web.Request) -> web.Response:
        """Open an update."""
        _only_target(await read_body(request, Selected, empty=True))
        await self._session.begin()
        return done("Success")

    async def end(self, _: web.Request) -> web.Response:
        """Make live what came since."""
        await self._session.end()
        return done("Success")

    async def disk(self, request: web.Request) -> web.Response:
        """Take a version from disk, or tensors of one by name; a path and a ``file://`` URI mean the same."""
        body = await read_body(request, FromDisk)
        _only_target(body)
        if body.load_format not in (None, "auto", "safetensors"):
            raise BadRequest(f"load_format {body.load_format!r} is not supported", advice="leave it out: safetensors")
        version = body.weight_version or ""
        async with self._session.part(version=version, abort_all=body.abort_all_requests) as update:
            part = DiskPart(uri=as_uri(body.model_path), owner=OWNER, names=tuple(body.weight_name_filter))
            await self._coordinator.parts.disk(update, part)
        return done(self._updated("Succeeded to update model weights."), num_paused_requests=0)

    async def tensor(self, request: web.Request) -> web.Response:
        """Take tensors: safetensors as the body, or in base64 where other engines expect pickles."""
        if request.content_type == BODY:
            return await self._body(request)
        body = await read_large(request, FromTensor, limit=MAX_BASE64_BYTES)
        _only_target(body)
        data = await asyncio.to_thread(unpacked, body.serialized_named_tensors)
        async with self._spool.holding(data) as file:
            await self._take(file, body)
        return done("Success")

    async def _body(self, request: web.Request) -> web.Response:
        query = request.query
        body = FromTensor(
            weight_version=query.get("weight_version"),
            load_format=query.get("load_format"),
            abort_all_requests=query.get("abort_all_requests", "").lower() == "true",
            selector=query.get("selector", "all"),
        )
        _only_target(body)
        async with self._spool.body(request, limit=self._coordinator.updates.largest_body()) as file:
            await self._take(file, body)
        return done("Success")

    async def _take(self, file: Path, body: FromTensor) -> None:
        async with self._session.part(version=body.weight_version or "", abort_all=body.abort_all_requests) as update:
            await self._coordinator.parts.tensors(update, file, owner=OWNER, loader=_loader(body.load_format))

    async def distributed(self, request: web.Request) -> web.Response:
        """Take tensors that a trainer broadcasts to a group while this call waits."""
        body = await read_large(request, FromDistributed, limit=MAX_NAMES_BYTES)
        _only_target(body)
        part = BroadcastPart(
            group=body.group_name,
            owner=OWNER,
            tensors=announced(body.names, body.dtypes, body.shapes),
            flattened=body.load_format == "flattened_bucket",
            loader=_loader(body.load_format),
        )
        if not part.tensors:
            raise BadRequest("no names are given", advice="name the tensors that are sent, in their order")
        async with self._session.part(version=body.weight_version or "", abort_all=body.abort_all_requests) as update:
            await self._coordinator.parts.broadcast(update, part)
        return done("Succeeded to update parameter online.")

    async def ipc(self, request: web.Request) -> web.Response:
        """Take tensors out of shared memory; handles of other engines are not opened."""
        body = await read_large(request, FromIpc, limit=MAX_NAMES_BYTES)
        _only_target(body)
        if not body.segment:
            raise BadRequest(
                "zmq_handles carry pickled handles, which can run code",
                advice='send {"segment": name of a POSIX shared memory segment, "tensors": [{"name", "dtype", "shape", '
                '"offset"}]}, or a body with safetensors to update_weights_from_tensor',
            )
        try:
            tensors = msgspec.convert(body.tensors, list[SharedTensor])
        except msgspec.ValidationError as error:
            raise BadRequest(f"tensors: {error}", advice='each is {"name", "dtype", "shape", "offset"}') from None
        part = SharedPart(segment=body.segment, owner=OWNER, tensors=tensors, loader=_loader(body.load_format))
        async with self._session.part(version=body.weight_version or "", abort_all=body.abort_all_requests) as update:
            await self._coordinator.parts.shared(update, part)
        return done("Success")

    def _updated(self, message: str) -> str:
        live = self._coordinator.live
        version = live.version if live is not None else ""
        return f"{message} Weight version updated to {version}." if not self._session.paused else message


def _only_target(body: Selected) -> None:
    if body.selector not in ("all", "target"):
        raise UnsupportedChange(
            f"selector {body.selector[:40]!r}: this engine has no draft model", advice="send selector all or target"
        )


def _loader(load_format: str | None) -> str:
    return "" if (load_format or "") in _OWN_FORMATS else str(load_format)


def as_uri(path: str) -> str:
    """Return the URI of a folder that may be given as a path.

    Raises:
        BadRequest: a path that is not absolute (elsewhere it would be the name of a model on a hub).
    """
    if "://" in path:
        return path
    if not path.startswith("/"):
        raise BadRequest(f"{path[:200]!r} is not an absolute path", advice="name a folder that the engine has mounted")
    return Path(path).as_uri()
