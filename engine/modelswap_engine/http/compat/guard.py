"""Which pods a trainer may change: asked before a body is read, for every route that is said to change something."""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from modelswap_engine.http.compat.sglang_answers import Handler

Permit = Callable[[], Awaitable[None]]


def guarded(handlers: Mapping[str, Handler], permit: Permit) -> dict[str, Handler]:
    """Return the handlers, each after ``permit``, which raises where weights are not a trainer's to change."""
    return {name: _after(permit, handler) for name, handler in handlers.items()}


def _after(permit: Permit, handler: Handler) -> Handler:
    @functools.wraps(handler)
    async def wrapped(*arguments: Any) -> web.StreamResponse:
        await permit()
        return await handler(*arguments)

    return wrapped
