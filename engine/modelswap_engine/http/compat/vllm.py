"""vLLM's control routes under ``/compat/vllm``, where they mean the same here.

``start_weight_update`` … ``finish_weight_update`` is one transaction. Errors have vLLM's shape, whose ``code`` is the
HTTP status; ours is beside it.
"""

import functools
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web

from modelswap_engine.http.bodies import json_response, read_body, read_large
from modelswap_engine.http.compat.guard import guarded
from modelswap_engine.http.compat.ranks import places
from modelswap_engine.http.compat.session import OWNER, PauseMode, TrainerSession
from modelswap_engine.http.compat.sglang_answers import Handler
from modelswap_engine.http.compat.sglang_weights import as_uri
from modelswap_engine.http.compat.tensors import announced
from modelswap_engine.http.compat.vllm_adapters import AdapterRoutes
from modelswap_engine.http.errors import body_of, response_of
from modelswap_engine.http.updates import MAX_NAMES_BYTES
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.protocol.errors import BadRequest, Busy, ModelswapError, UnsupportedChange
from modelswap_engine.protocol.messages import CheckRequest
from modelswap_engine.protocol.transfers import GroupBackend, JoinGroupRequest
from modelswap_engine.protocol.updates import BroadcastPart, DiskPart
from modelswap_engine.swap.coordinator import Coordinator

PREFIX: Final = "/compat/vllm"
GROUP: Final = "weight_transfer"
_MODES: Final = {"abort": PauseMode.ABORT, "wait": PauseMode.WAIT, "keep": PauseMode.RETRACT}


class InitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer listens. ``backend`` is this engine's own: gloo, or nccl through torch's process groups."""

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=0)]
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    backend: GroupBackend = GroupBackend.NCCL


class Init(msgspec.Struct, frozen=True, kw_only=True):
    """``init_weight_transfer_engine``."""

    init_info: InitInfo


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that are broadcast now; or, this engine's own, a checkpoint on disk."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool = False
    path: str = ""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """``update_weights``: one for all ranks, or a list of equal ones."""

    update_info: UpdateInfo | list[UpdateInfo]


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """``finish_weight_update``."""

    weight_version: str | None = None


class Rename(msgspec.Struct, frozen=True, kw_only=True):
    """``update_weight_version``."""

    new_version: str


class Checker(msgspec.Struct, frozen=True, kw_only=True):
    """``weight_checker``."""

    action: str = "checksum"
    baseline: dict[str, str] = {}


class VllmRoutes:
    """All of them."""

    def __init__(self, *, coordinator: Coordinator, session: TrainerSession, adapters: AdapterDesk | None) -> None:
        self._coordinator = coordinator
        self._session = session
        self._adapters = AdapterRoutes(adapters, coordinator=coordinator) if adapters is not None else None

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        changing: dict[str, Handler] = {
            "pause": self.pause,
            "init_weight_transfer_engine": self.init,
            "start_weight_update": self.start,
            "start_draft_weight_update": self.draft,
            "update_weights": self.update,
            "finish_weight_update": self.finish,
            "update_weight_version": self.rename,
        }
        if self._adapters is not None:
            changing["v1/load_lora_adapter"] = self._adapters.load
            changing["v1/unload_lora_adapter"] = self._adapters.unload
        posts: dict[str, Handler] = {
            "resume": self.resume,
            "shutdown_weight_transfer_engine": self.shutdown,
            "reset_prefix_cache": self.reset_cache,
            "weight_checker": self.check,
        }
        gets: dict[str, Handler] = {
            "is_paused": self.is_paused,
            "weight_info": self.info,
            "get_world_size": self.world_size,
        }
        posts |= guarded(changing, self._coordinator.updates.permit)
        table = [web.post(f"{PREFIX}/{name}", _answering(handler)) for name, handler in posts.items()]
        return table + [web.get(f"{PREFIX}/{name}", _answering(handler)) for name, handler in gets.items()]

    async def pause(self, request: web.Request) -> web.Response:
        """Hold new requests; ``keep`` without clearing the cache freezes those in flight."""
        mode = request.query.get("mode", "abort")
        if mode not in _MODES:
            raise BadRequest(f"unknown mode {mode[:40]!r}", advice="use abort, wait or keep")
        kept = mode == "keep" and request.query.get("clear_cache", "true").lower() == "false"
        await self._session.pause(PauseMode.IN_PLACE if kept else _MODES[mode])
        return json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        """Let requests in again."""
        await self._session.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        """Say whether new requests are held."""
        return json_response({"is_paused": self._session.paused})

    async def init(self, request: web.Request) -> web.Response:
        """Meet the trainer."""
        info = (await read_body(request, Init)).init_info
        order = JoinGroupRequest(
            group=GROUP,
            address=info.master_address,
            port=info.master_port,
            rank=info.rank_offset,
            size=info.world_size,
            backend=info.backend,
        )
        await self._coordinator.export.join(order)
        return json_response({"message": "Weight transfer initialized"})

    async def shutdown(self, _: web.Request) -> web.Response:
        """Leave the trainer's group."""
        await self._coordinator.export.leave(GROUP)
        return json_response({"message": "Weight transfer shut down"})

    async def start(self, _: web.Request) -> web.Response:
        """Open an update."""
        await self._session.begin()
        return json_response({"message": "Weight update started"})

    async def draft(self, _: web.Request) -> web.Response:
        """Refuse: there is no draft model."""
        raise UnsupportedChange("this engine has no draft model", advice="use start_weight_update")

    async def update(self, request: web.Request) -> web.Response:
        """Take tensors that the trainer broadcasts while this call waits, or a checkpoint from disk."""
        info = _the_one((await read_large(request, Update, limit=MAX_NAMES_BYTES)).update_info)
        if info.packed:
            raise UnsupportedChange("packed buckets are not understood", advice="send the tensors one by one")
        if not (info.names or info.path):
            raise BadRequest("update_info names no tensors and no path", advice="send names, dtype_names and shapes")
        async with self._session.part() as update:
            if info.path:
                await self._coordinator.parts.disk(update, DiskPart(uri=as_uri(info.path), owner=OWNER))
            else:
                tensors = announced(info.names, info.dtype_names, info.shapes)
                part = BroadcastPart(group=GROUP, owner=OWNER, tensors=tensors)
                await self._coordinator.parts.broadcast(update, part)
        return json_response({"message": "Weights updated"})

    async def finish(self, request: web.Request) -> web.Response:
        """Make live what came since the start."""
        body = await read_body(request, Finish, empty=True)
        await self._session.end(version=body.weight_version or "")
        return json_response({"message": "Weight update finished"})

    async def info(self, _: web.Request) -> web.Response:
        """Say which version serves."""
        live = self._coordinator.live
        return json_response({"weight_version": live.version if live is not None else ""})

    async def rename(self, request: web.Request) -> web.Response:
        """Give the live weights another label."""
        body = await read_body(request, Rename)
        await self._session.rename(body.new_version)
        return json_response({"success": True, "new_version": body.new_version})

    async def reset_cache(self, _: web.Request) -> web.Response:
        """Forget cached keys and values; no while requests run."""
        try:
            await self._session.flush()
        except Busy:
            return json_response({"success": False})
        return json_response({"success": True})

    async def world_size(self, _: web.Request) -> web.Response:
        """Say how many ranks there are."""
        return json_response({"world_size": len(self._coordinator.state().ranks)})

    async def check(self, request: web.Request) -> web.Response:
        """Hash the live weights, in checkpoint coordinates."""
        body = await read_body(request, Checker, empty=True)
        if body.action not in ("checksum", "compare"):
            raise UnsupportedChange(
                f"action {body.action[:40]!r} is not done here: live weights are not changed for a test",
                advice="use checksum or compare",
            )
        result = await self._coordinator.check(CheckRequest())
        found = {
            f"dp{place.dp}:pp0:pcp0:tp{place.tp}:{name}": value
            for place in places(self._coordinator.state().ranks, result)
            for name, value in place.hashes.items()
        }
        if body.action == "checksum":
            return json_response({"checksums": found})
        wrong = sorted(n for n in body.baseline.keys() | found.keys() if body.baseline.get(n) != found.get(n))
        return json_response({"match": not wrong, "mismatches": wrong})


def _the_one(info: UpdateInfo | list[UpdateInfo]) -> UpdateInfo:
    if isinstance(info, UpdateInfo):
        return info
    if not info or any(other != info[0] for other in info):
        raise BadRequest("update_info differs between ranks", advice="send one; every rank gets the whole tensors")
    return info[0]


def _answering(handler: Handler) -> Handler:
    @functools.wraps(handler)
    async def wrapped(*arguments: Any) -> web.StreamResponse:
        try:
            return await handler(*arguments)
        except ModelswapError as error:
            body = body_of(error)
            answer = {
                "error": {
                    "message": f"{error.message} ({error.advice})" if error.advice else error.message,
                    "type": error.code,
                    "param": None,
                    "code": error.status,
                    "modelswap": body,
                }
            }
            ours = response_of(error).headers
            headers = {"Retry-After": ours["Retry-After"]} if "Retry-After" in ours else None
            return json_response(answer, status=error.status, headers=headers)

    return wrapped
