"""vLLM's routes for LoRA adapters, over the adapter desk of this engine; answers are text, as there."""

from aiohttp import web
from msgspec import Struct

from modelswap_engine.http.bodies import read_body
from modelswap_engine.http.compat.sglang_weights import as_uri
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.protocol.adapter_calls import LoadAdapterRequest, UnloadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.codec import decode, encode
from modelswap_engine.protocol.messages import Fence
from modelswap_engine.swap.coordinator import Coordinator


class Load(Struct, frozen=True, kw_only=True):
    """``load_lora_adapter``; other content takes a known name over, with or without ``load_inplace``."""

    lora_name: str
    lora_path: str


class Unload(Struct, frozen=True, kw_only=True):
    """``unload_lora_adapter``."""

    lora_name: str


class AdapterRoutes:
    """Handlers of these routes."""

    def __init__(self, desk: AdapterDesk, *, coordinator: Coordinator) -> None:
        self._desk = desk
        self._coordinator = coordinator

    async def load(self, request: web.Request) -> web.Response:
        """Load an adapter."""
        body = await read_body(request, Load)
        source = decode(encode({"name": body.lora_name, "uri": as_uri(body.lora_path)}), AdapterSource)
        await self._desk.load(LoadAdapterRequest(source=source, fence=self._fence()))
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        """Unload an adapter."""
        body = await read_body(request, Unload)
        await self._desk.unload(body.lora_name, UnloadAdapterRequest(fence=self._fence()))
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _fence(self) -> Fence:
        """Return who calls: nobody in particular."""
        return Fence(pod_uid=self._coordinator.state().pod_uid)
