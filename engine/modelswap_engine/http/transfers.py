"""The routes of process groups and of weights that leave the engine, under ``/modelswap/v1``."""

from aiohttp import web

from modelswap_engine.http.bodies import json_response, read_body
from modelswap_engine.protocol.transfers import JoinGroupRequest, ReadRequest, SaveRequest, SendRequest
from modelswap_engine.protocol.version import CONTROL_PREFIX
from modelswap_engine.swap.coordinator import Coordinator

GROUPS = f"{CONTROL_PREFIX}/groups"
EXPORT = f"{CONTROL_PREFIX}/export"


class TransferRoutes:
    """Handlers of the group and export routes."""

    def __init__(self, *, coordinator: Coordinator) -> None:
        self._export = coordinator.export

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        return [
            web.post(GROUPS, self.join),
            web.post(f"{GROUPS}/{{name}}/leave", self.leave),
            web.post(f"{GROUPS}/{{name}}/send", self.send),
            web.post(f"{EXPORT}/read", self.read),
            web.post(f"{EXPORT}/save", self.save),
        ]

    async def join(self, request: web.Request) -> web.Response:
        """Meet the other members of a group; answers when all are there."""
        await self._export.join(await read_body(request, JoinGroupRequest))
        return web.Response(status=204)

    async def leave(self, request: web.Request) -> web.Response:
        """Leave a group."""
        await self._export.leave(request.match_info["name"])
        return web.Response(status=204)

    async def send(self, request: web.Request) -> web.Response:
        """Broadcast the live tensors to a group."""
        order = await read_body(request, SendRequest, empty=True)
        return json_response(await self._export.send(request.match_info["name"], order))

    async def read(self, request: web.Request) -> web.Response:
        """Show some numbers of one live tensor."""
        return json_response(await self._export.read(await read_body(request, ReadRequest)))

    async def save(self, request: web.Request) -> web.Response:
        """Write the live version as a checkpoint folder."""
        return json_response(await self._export.save(await read_body(request, SaveRequest)), status=201)
