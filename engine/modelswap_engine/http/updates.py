"""The routes of weight updates under ``/modelswap/v1/updates``: begin, parts, commit, abort."""

from aiohttp import web

from modelswap_engine.http.bodies import json_response, read_body, read_large
from modelswap_engine.http.spool import Spool
from modelswap_engine.protocol.updates import (
    AbortUpdate,
    BeginUpdate,
    BroadcastPart,
    CommitUpdate,
    DiskPart,
    SharedPart,
)
from modelswap_engine.protocol.version import CONTROL_PREFIX
from modelswap_engine.swap.coordinator import Coordinator

PREFIX = f"{CONTROL_PREFIX}/updates"
MAX_NAMES_BYTES = 64 * 1024 * 1024
"""Of a body that describes all tensors of a model."""


class UpdateRoutes:
    """Handlers of the update routes.

    Args:
        coordinator: has the updates.
        spool: takes the bodies with tensors.
    """

    def __init__(self, *, coordinator: Coordinator, spool: Spool) -> None:
        self._updates = coordinator.updates
        self._parts = coordinator.parts
        self._spool = spool

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        return [
            web.post(PREFIX, self.begin),
            web.get(f"{PREFIX}/{{id}}", self.state),
            web.post(f"{PREFIX}/{{id}}/disk", self.disk),
            web.post(f"{PREFIX}/{{id}}/tensors", self.tensors),
            web.post(f"{PREFIX}/{{id}}/shared", self.shared),
            web.post(f"{PREFIX}/{{id}}/broadcast", self.broadcast),
            web.post(f"{PREFIX}/{{id}}/commit", self.commit),
            web.post(f"{PREFIX}/{{id}}/abort", self.abort),
        ]

    async def begin(self, request: web.Request) -> web.Response:
        """Open an update, or renew its lease."""
        order = await read_body(request, BeginUpdate)
        return json_response(await self._updates.begin(order), status=201)

    async def state(self, request: web.Request) -> web.Response:
        """Show what has arrived."""
        return json_response(self._updates.state(request.match_info["id"]))

    async def disk(self, request: web.Request) -> web.Response:
        """Add tensors of a checkpoint at a source."""
        return json_response(await self._parts.disk(request.match_info["id"], await read_body(request, DiskPart)))

    async def tensors(self, request: web.Request) -> web.Response:
        """Add the tensors of the body, which is a safetensors file; ``owner`` and ``loader`` are in the query."""
        update = request.match_info["id"]
        limit = self._updates.largest_part(update)
        async with self._spool.body(request, limit=limit) as file:
            state = await self._parts.tensors(
                update, file, owner=request.query.get("owner", ""), loader=request.query.get("loader", "")
            )
        return json_response(state)

    async def shared(self, request: web.Request) -> web.Response:
        """Add tensors of a shared memory segment."""
        part = await read_large(request, SharedPart, limit=MAX_NAMES_BYTES)
        return json_response(await self._parts.shared(request.match_info["id"], part))

    async def broadcast(self, request: web.Request) -> web.Response:
        """Add tensors that a member of a process group sends while this call waits."""
        part = await read_large(request, BroadcastPart, limit=MAX_NAMES_BYTES)
        return json_response(await self._parts.broadcast(request.match_info["id"], part))

    async def commit(self, request: web.Request) -> web.Response:
        """Make all of it live; answers when the swap has ended, with its status."""
        order = await read_body(request, CommitUpdate, empty=True)
        return json_response(await self._updates.commit(request.match_info["id"], order))

    async def abort(self, request: web.Request) -> web.Response:
        """Drop all of it."""
        await self._updates.abort(request.match_info["id"], await read_body(request, AbortUpdate, empty=True))
        return web.Response(status=204)
