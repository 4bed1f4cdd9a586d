"""Answers in SGLang's shape: ``{"success", "message"}`` and the facts of the call, errors the same with a status."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from modelswap_engine.http.bodies import json_response
from modelswap_engine.http.errors import body_of, response_of
from modelswap_engine.protocol.errors import ModelswapError

Handler = Callable[..., Awaitable[web.StreamResponse]]
_KEPT: Final = frozenset({401, 403, 408, 409, 413, 503})
"""Statuses that say something to a client that knows nothing of us; every other refusal is 400, as there."""


def done(message: str = "Success.", **facts: Any) -> web.Response:
    """Return the answer to a call that did what it was asked for."""
    return json_response({"success": True, "message": message, **facts})


def refused(error: ModelswapError, **facts: Any) -> web.Response:
    """Return the answer to a call that did not; our own error is beside their fields."""
    status = error.status if error.status in _KEPT or error.status >= 500 else 400
    advice = f" ({error.advice})" if error.advice else ""
    body = {"success": False, "message": f"{error.message}{advice}", **facts, "error": body_of(error)}
    answer = json_response(body, status=status)
    if "Retry-After" in (ours := response_of(error).headers):
        answer.headers["Retry-After"] = ours["Retry-After"]
    return answer


def answering(handler: Handler) -> Handler:
    """Turn the errors of a handler into SGLang's answers; what nobody meant is left to the port."""

    @functools.wraps(handler)
    async def wrapped(*arguments: Any) -> web.StreamResponse:
        try:
            return await handler(*arguments)
        except ModelswapError as error:
            return refused(error)

    return wrapped
