"""SGLang's routes for LoRA adapters, over the adapter desk of this engine."""

from aiohttp import web

from modelswap_engine.http.bodies import json_response, read_body
from modelswap_engine.http.compat import sglang_bodies as bodies
from modelswap_engine.http.compat.sglang_answers import refused
from modelswap_engine.http.compat.sglang_weights import as_uri
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.protocol.adapter_calls import LoadAdapterRequest, UnloadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.codec import decode, encode
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.protocol.messages import Fence
from modelswap_engine.swap.coordinator import Coordinator


class AdapterRoutes:
    """Handlers of these routes."""

    def __init__(self, desk: AdapterDesk, *, coordinator: Coordinator) -> None:
        self._desk = desk
        self._coordinator = coordinator

    async def load(self, request: web.Request) -> web.Response:
        """Load an adapter; the same content under its name again changes nothing, other content takes the name over."""
        body = await read_body(request, bodies.LoadAdapter)
        try:
            fields = {"name": body.lora_name, "uri": as_uri(body.lora_path), "pinned": body.pinned}
            source = decode(encode(fields), AdapterSource)
            await self._desk.load(LoadAdapterRequest(source=source, fence=self._fence()))
        except ModelswapError as error:
            return refused(error, error_message=error.message, loaded_adapters=None)
        return self._done()

    async def unload(self, request: web.Request) -> web.Response:
        """Unload an adapter; it never comes back by itself."""
        body = await read_body(request, bodies.UnloadAdapter)
        try:
            await self._desk.unload(body.lora_name, UnloadAdapterRequest(fence=self._fence()))
        except ModelswapError as error:
            return refused(error, error_message=error.message, loaded_adapters=None)
        return self._done()

    def _fence(self) -> Fence:
        """Return who calls: nobody in particular."""
        return Fence(pod_uid=self._coordinator.state().pod_uid)

    def _done(self) -> web.Response:
        loaded = {item.name: item.uri for item in self._desk.registered()}
        return json_response({"success": True, "error_message": "", "loaded_adapters": loaded})
