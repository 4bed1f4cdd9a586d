"""SGLang's control routes under ``/compat/sglang``: the table, pausing, looking, and adapters."""

from typing import Any, Final

from aiohttp import web

from modelswap_engine.http.bodies import json_response, read_body
from modelswap_engine.http.compat import sglang_bodies as bodies
from modelswap_engine.http.compat.guard import guarded
from modelswap_engine.http.compat.ranks import Place, places
from modelswap_engine.http.compat.session import PauseMode, TrainerSession
from modelswap_engine.http.compat.sglang_adapters import AdapterRoutes
from modelswap_engine.http.compat.sglang_answers import Handler, answering, done
from modelswap_engine.http.compat.sglang_export import ExportRoutes
from modelswap_engine.http.compat.sglang_weights import WeightRoutes
from modelswap_engine.http.spool import Spool
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.protocol.errors import BadRequest, Busy, UnsupportedChange
from modelswap_engine.protocol.messages import CheckAction, CheckRequest
from modelswap_engine.swap.coordinator import Coordinator

PREFIX: Final = "/compat/sglang"
_HASH_SHOWN: Final = 16
_ACTIONS: Final = {
    "checksum": CheckAction.VERIFY,
    "snapshot": CheckAction.SNAPSHOT,
    "compare": CheckAction.COMPARE,
}


class SglangRoutes:
    """All of them."""

    def __init__(
        self, *, coordinator: Coordinator, session: TrainerSession, spool: Spool, adapters: AdapterDesk | None
    ) -> None:
        self._coordinator = coordinator
        self._session = session
        self._weights = WeightRoutes(coordinator=coordinator, session=session, spool=spool)
        self._export = ExportRoutes(coordinator=coordinator)
        self._adapters = AdapterRoutes(adapters, coordinator=coordinator) if adapters is not None else None

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        weights, export = self._weights, self._export
        changing: dict[str, Handler] = {
            "pause_generation": self.pause,
            "begin_weight_update": weights.begin,
            "end_weight_update": weights.end,
            "update_weights_from_disk": weights.disk,
            "update_weights_from_tensor": weights.tensor,
            "update_weights_from_distributed": weights.distributed,
            "update_weights_from_ipc": weights.ipc,
            "init_weights_update_group": export.init_group,
            "update_weight_version": self.rename,
        }
        if self._adapters is not None:
            changing |= {"load_lora_adapter": self._adapters.load, "unload_lora_adapter": self._adapters.unload}
        posts: dict[str, Handler] = {
            "continue_generation": self.resume,
            "destroy_weights_update_group": export.destroy_group,
            "init_weights_send_group_for_remote_instance": export.init_send_group,
            "send_weights_to_remote_instance": export.send,
            "save_sharded_model": export.save_sharded,
            "save_remote_model": export.save_remote,
        }
        both: dict[str, Handler] = {
            "weights_checker": self.check,
            "check_weights": self.check,
            "get_weights_by_name": export.by_name,
            "flush_cache": self.flush,
        }
        gets: dict[str, Handler] = {
            "model_info": self.info,
            "get_model_info": self.info,
            "get_weight_version": self.version,
            "health": self.health,
            "health_generate": self.health,
        }
        posts |= both | guarded(changing, self._coordinator.updates.permit)
        table = [web.post(f"{PREFIX}/{name}", answering(handler)) for name, handler in posts.items()]
        return table + [web.get(f"{PREFIX}/{name}", answering(handler)) for name, handler in (gets | both).items()]

    async def pause(self, request: web.Request) -> web.Response:
        """Hold new requests, by lease; what those in flight do is in the mode."""
        body = await read_body(request, bodies.Pause, empty=True)
        if body.mode not in (PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE):
            raise BadRequest(f"unknown mode {body.mode[:40]!r}", advice="use abort, retract or in_place")
        await self._session.pause(PauseMode(body.mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        """Make live what came during the pause, and let requests in again."""
        await self._session.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def rename(self, request: web.Request) -> web.Response:
        """Give the live weights another label."""
        body = await read_body(request, bodies.Rename)
        await self._session.rename(body.new_version, abort_all=body.abort_all_requests)
        when = " when generation continues" if self._session.paused else ""
        return done(f"Weight version updated to {body.new_version}{when}", new_version=body.new_version)

    async def flush(self, _: web.Request) -> web.Response:
        """Forget cached keys and values."""
        try:
            await self._session.flush()
        except Busy:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    async def info(self, _: web.Request) -> web.Response:
        """Say what serves."""
        state = self._coordinator.state()
        live = state.live
        return json_response(
            {
                "model_path": live.uri if live is not None else "",
                "tokenizer_path": live.uri if live is not None else "",
                "served_model_name": state.served_model_name,
                "is_generation": True,
                "load_format": "safetensors",
                "weight_version": live.version if live is not None else "",
                "weight_digest": live.digest if live is not None else "",
            }
        )

    async def version(self, _: web.Request) -> web.Response:
        """Say which version serves; a route of older releases that trainers still ask."""
        live = self._coordinator.live
        return json_response({"weight_version": live.version if live is not None else ""})

    async def health(self, _: web.Request) -> web.Response:
        """Say whether requests are answered; a pause is no illness."""
        return web.Response(status=200 if self._coordinator.ready() else 503)

    async def check(self, request: web.Request) -> web.Response:
        """Hash the live weights: in checkpoint coordinates, the first digits of SHA-256, as there on the CPU."""
        body = await read_body(request, bodies.Checker, empty=True)
        if body.selector not in ("all", "target"):
            raise UnsupportedChange("this engine has no draft model", advice="send selector all or target")
        if body.action not in _ACTIONS:
            raise BadRequest(f"Unsupported action={body.action[:40]!r}", advice="live weights stay as they are")
        result = await self._coordinator.check(CheckRequest(action=_ACTIONS[body.action]))
        digest = result.digest.removeprefix("sha256:")
        found = places(self._coordinator.state().ranks, result)
        facts = {"ranks": [_rank(place, digest) for place in found], "per_engine_checksum": digest}
        if not result.ok:
            names = ", ".join(f"{i.name} (rank {', '.join(map(str, i.ranks))})" for i in result.mismatched[:5])
            return json_response({"success": False, "message": f"changed: {names}", **facts}, status=400)
        return done("Success.", **facts)


def _rank(place: Place, digest: str) -> dict[str, Any]:
    seat = {"tp_rank": place.tp, "tp_size": place.tp_size, "dp_rank": place.dp, "dp_size": place.dp_size}
    return {
        "checksums": {name: value[:_HASH_SHOWN] for name, value in place.hashes.items()},
        "per_gpu_checksum": digest,
        "parallelism_info": [{"role": "target", **seat}],
    }
