"""The routes of the control port about LoRA adapters: parse, ask the desk, answer.

A client that goes away cancels nothing: an adapter that was asked for is loaded.
"""

from typing import Final

from aiohttp import web

from modelswap_engine.http.bodies import json_response, read_body, read_large
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.protocol.adapter_calls import (
    AssignAdaptersRequest,
    LoadAdapterRequest,
    ResolveAdaptersRequest,
    UnloadAdapterRequest,
)
from modelswap_engine.protocol.adapters import AdapterState
from modelswap_engine.protocol.looking import LookRequest
from modelswap_engine.protocol.version import CONTROL_PREFIX

MAX_ASSIGNMENT_BYTES: Final = 2 << 20
"""More than a ConfigMap holds."""


class AdapterPort:
    """Handlers of ``/adapters``; a name may hold slashes."""

    def __init__(self, desk: AdapterDesk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        one = f"{CONTROL_PREFIX}/adapters/{{name:.+}}"
        return [
            web.get(f"{CONTROL_PREFIX}/adapters", self.view),
            web.post(f"{CONTROL_PREFIX}/adapters", self.load),
            web.put(f"{CONTROL_PREFIX}/adapters", self.assign),
            web.post(f"{CONTROL_PREFIX}/adapters/resolve", self.resolve),
            web.post(f"{CONTROL_PREFIX}/adapters/look", self.look),
            web.get(one, self.status),
            web.delete(one, self.unload),
        ]

    async def view(self, _: web.Request) -> web.Response:
        """Show all adapters and what there is room for."""
        return json_response(self._desk.view())

    async def status(self, request: web.Request) -> web.Response:
        """Show the adapter that a name leads to."""
        return json_response(self._desk.status(request.match_info["name"]))

    async def load(self, request: web.Request) -> web.Response:
        """Load an adapter, or let other content take its name over."""
        order = await read_body(request, LoadAdapterRequest)
        return json_response(await self._desk.load(order, if_match=request.headers.get("If-Match")))

    async def assign(self, request: web.Request) -> web.Response:
        """Follow an assignment of adapters."""
        order = await read_large(request, AssignAdaptersRequest, limit=MAX_ASSIGNMENT_BYTES)
        return json_response(await self._desk.assign(order, if_match=request.headers.get("If-Match")))

    async def resolve(self, request: web.Request) -> web.Response:
        """Say what sources hold."""
        return json_response(await self._desk.reader.resolve(await read_body(request, ResolveAdaptersRequest)))

    async def look(self, request: web.Request) -> web.Response:
        """Say whether an adapter's source still holds it."""
        return json_response(await self._desk.reader.look(await read_body(request, LookRequest)))

    async def unload(self, request: web.Request) -> web.Response:
        """Unload an adapter; 202 when requests use it longer than the call wanted to wait."""
        order = await read_body(request, UnloadAdapterRequest, empty=True)
        name = request.match_info["name"]
        status = await self._desk.unload(name, order, if_match=request.headers.get("If-Match"))
        return json_response(status, status=200 if status.state is AdapterState.UNLOADED else 202)
