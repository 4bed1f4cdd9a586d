"""The spans of swaps, made of what every operation shows of itself; the caller's span is taken from its headers.

Phases have the names that they have in the metrics. What a span says of a swap is what its status says.
"""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from modelswap_engine.http.errors import Handler
from modelswap_engine.http.metrics import PHASES
from modelswap_engine.protocol import telemetry
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.telemetry import OPERATION, Attributes, Span

_FAILING: Final = frozenset({SwapState.ABORTED, SwapState.ROLLING_BACK, SwapState.QUARANTINED})
"""States that a phase ends in when it has failed."""


def trace_middleware() -> Middleware:
    """Return what makes the caller's span the current one, for the tasks that a call begins too."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        with telemetry.received(request.headers):
            return await handler(request)

    return middleware


class SwapSpans:
    """One operation: a span for the whole, and one for each phase inside it."""

    def __init__(self) -> None:
        self._swap: Span | None = None
        self._phase: Span | None = None
        self._last: SwapStatus | None = None

    def see(self, status: SwapStatus) -> None:
        """Take in the next status."""
        last, self._last = self._last, status
        if last is not None and last.state is status.state:
            return
        if self._swap is None:
            self._swap = Span("swap", {OPERATION: status.operation_id, "modelswap.revision": status.revision})
        self._end_phase(status, failed=status.state in _FAILING)
        if (name := PHASES.get(status.state)) is not None:
            self._phase = Span(name, {OPERATION: status.operation_id}, parent=self._swap)

    def close(self) -> None:
        """End what is open: with the outcome, or unfinished where this process ends first."""
        if self._last is None or self._swap is None:
            return
        status = self._last
        self._end_phase(status, failed=not status.state.terminal)
        self._swap.note(_facts(status))
        self._swap.end(failure="" if status.state.succeeded else _reason(status))

    def _end_phase(self, status: SwapStatus, *, failed: bool) -> None:
        if self._phase is not None:
            self._phase.note(_facts(status))
            self._phase.end(failure=_reason(status) if failed else "")
            self._phase = None


def _reason(status: SwapStatus) -> str:
    return status.error.code if status.error is not None else status.state.value


def _facts(status: SwapStatus) -> Attributes:
    return {
        "modelswap.outcome": status.state.value,
        "modelswap.error": status.error.code if status.error is not None else None,
        "modelswap.source.digest": status.source.digest,
        "modelswap.target.digest": status.target.digest,
        "modelswap.fetched.bytes": status.bytes_fetched,
        "modelswap.peers.bytes": status.bytes_from_peers,
        "modelswap.staged.bytes": status.bytes_staged,
        "modelswap.commit.microseconds": status.commit_window_microseconds,
        "modelswap.pause.seconds": status.pause_seconds,
    }
