"""Every error that leaves a port leaves it here, as typed JSON.

Handlers raise :class:`ModelswapError`; this module knows statuses and headers and nothing of what failed. An
exception nobody meant becomes ``Internal`` with a reference that finds the traceback in the log; the traceback
itself never reaches a client.
"""

import math
import secrets
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from modelswap_engine.protocol.codec import encode
from modelswap_engine.protocol.errors import (
    BadRequest,
    ErrorBody,
    ErrorEnvelope,
    Internal,
    ModelswapError,
    NotFound,
    Unauthenticated,
    Unavailable,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_AFTER_DETAIL = "retryAfterSeconds"
PARAM_DETAIL = "param"

_log = structlog.get_logger("modelswap.http")


class MethodNotAllowed(BadRequest):
    """The route exists, but not for this method."""

    code = "MethodNotAllowed"
    status = 405


class TooLarge(BadRequest):
    """The body is larger than this port accepts."""

    code = "TooLarge"
    status = 413


class TooSlow(BadRequest):
    """The body did not arrive in time."""

    code = "TooSlow"
    status = 408
    retryable = True


class RangeNotSatisfiable(BadRequest):
    """Nothing of the range that was asked for is there."""

    code = "RangeNotSatisfiable"
    status = 416


class PortErrorBody(ErrorBody, omit_defaults=True):
    """The protocol's error with OpenAI's ``param``: which field of the request is meant."""

    param: str | None = None


def body_of(error: ModelswapError) -> PortErrorBody:
    """Return the wire form that both control clients and OpenAI clients read."""
    body = error.body()
    details = dict(body.details)
    return PortErrorBody(
        code=body.code,
        message=body.message,
        retryable=body.retryable,
        advice=body.advice,
        type=body.type,
        param=details.pop(PARAM_DETAIL, None),
        details=details,
    )


def response_of(error: ModelswapError) -> web.Response:
    """Return the HTTP answer of an error."""
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="modelswap"'
    if isinstance(error, Unavailable) and error.status == 503:
        headers["Retry-After"] = _retry_after(error)
    return web.Response(
        body=encode(ErrorEnvelope(error=body_of(error))),
        status=error.status,
        content_type="application/json",
        headers=headers,
    )


def _retry_after(error: ModelswapError) -> str:
    try:
        seconds = float(error.details.get(RETRY_AFTER_DETAIL, "1"))
    except ValueError:
        seconds = 1.0
    return str(max(1, math.ceil(seconds)))


def internal(error: Exception, *, where: str) -> Internal:
    """Log an exception that nobody meant, and return what a client may know of it."""
    reference = secrets.token_hex(6)
    _log.error("unexpected error", reference=reference, where=where, exc_info=error)
    return Internal(
        f"internal error, reference {reference}",
        advice="look for the reference in the log of this pod and report it",
        details={"reference": reference},
    )


def _from_http(request: web.Request, error: web.HTTPException) -> ModelswapError:
    where = f"{request.method} {request.path}"
    if error.status == 404:
        return NotFound(f"no route {where[:200]}", advice="see the API reference of this port")
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        return MethodNotAllowed(f"{where[:200]} is not allowed", advice=f"use {allowed}" if allowed else "")
    if error.status == 413:
        return TooLarge(f"the body of {where[:200]} is too large", advice="send a smaller request")
    return BadRequest(f"{where[:200]}: {error.reason}")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into the typed JSON answer."""
    try:
        return await handler(request)
    except ModelswapError as error:
        return response_of(error)
    except web.HTTPException as error:
        return response_of(_from_http(request, error))
    except ConnectionResetError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: nothing but typed errors may pass it
        return response_of(internal(error, where=f"{request.method} {request.path}"))
