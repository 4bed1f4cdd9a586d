"""The routes of the data port before an external engine.

The order within a request is the contract with the swap transaction: pass the gate, enter the update lock, acquire the
adapter, write the request with the admitted version's names, hand it to the engine, say so, pass the answer on. The
contexts are left in reverse, each exactly once, however the request ends.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from aiohttp import web

from modelswap_engine.http.bodies import read_bytes
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.openai.exchange import (
    ADAPTER_DIGEST_HEADER,
    ADAPTER_HEADER,
    DIGEST_HEADER,
    VERSION_HEADER,
    Outcome,
    header_value,
)
from modelswap_engine.http.openai.names import Names
from modelswap_engine.http.openai.routes import REQUIRE_HEADER
from modelswap_engine.http.places import Places
from modelswap_engine.http.proxy import rewriting
from modelswap_engine.http.proxy.dialects import Dialect, Route
from modelswap_engine.http.proxy.exchange import Exchange
from modelswap_engine.http.proxy.flights import Flight, Flights
from modelswap_engine.http.proxy.headers import to_client, to_engine
from modelswap_engine.http.proxy.upstream import Upstream
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.entries import Entry
from modelswap_engine.protocol.errors import NotReady
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.coordinator import Coordinator

T = TypeVar("T")

_LARGE: Final = 256 << 10
"""A body of more bytes is read and written away from the event loop."""
_METRICS_BYTES: Final = 16 << 20


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """Bounds and names of the data port.

    Attributes:
        served_model_name: the base model's name for clients, whatever the engine calls it.
        write_seconds: how long one write may wait for a client that does not read.
        max_requests: requests inside at once, waiting ones too; one more is answered "overloaded".
        max_body_bytes: of a request; a larger one is refused.
    """

    served_model_name: str
    max_body_bytes: int = 32 << 20
    write_seconds: float = 30.0
    max_requests: int = 2048


@dataclass(frozen=True)
class _Guest:
    """A request that was let in: ``size`` bytes of body, the version that serves it, the adapter that it uses."""

    id: str
    route: Route
    asked: rewriting.Asked
    size: int
    live: VersionRef
    entry: Entry | None

    @property
    def adapter(self) -> str:
        """The engine's name of the adapter, "" for the base."""
        return self.entry.id if self.entry is not None else ""

    def headers(self) -> Mapping[str, str]:
        """Return what its answer says of who answers."""
        headers = {
            VERSION_HEADER: header_value(self.live.version),
            DIGEST_HEADER: self.live.digest,
            "X-Request-Id": self.id,
            "X-Accel-Buffering": "no",
        }
        if self.entry is not None:
            headers |= {ADAPTER_HEADER: self.entry.id, ADAPTER_DIGEST_HEADER: self.entry.content.digest}
        return headers


class ProxyPort:
    """Handlers of all that is let through to an engine.

    Args:
        coordinator: lets requests in, and says which version serves them.
        dialect: of the engine.
        upstream: the engine's port.
        flights: counts what the engine has.
        metrics: counts requests.
        settings: bounds and names.
        base: tells the engine's own name of the base model.
        on_lost: told when the engine does not answer as one that lives.
        adapters: those on the base; None when there are none.
        clock: seconds that never go back; ``wall_clock`` seconds since 1970.
    """

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        dialect: Dialect,
        upstream: Upstream,
        flights: Flights,
        metrics: Metrics,
        settings: ProxySettings,
        base: Callable[[], str],
        on_lost: Callable[[], None],
        adapters: AdapterDesk | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._dialect = dialect
        self._upstream = upstream
        self._flights = flights
        self._metrics = metrics
        self._settings = settings
        self._base = base
        self._on_lost = on_lost
        self._clock = clock
        self._places = Places(settings.max_requests)
        self._names = Names(
            settings.served_model_name, coordinator=coordinator, adapters=adapters, since=int(wall_clock())
        )

    def routes(self) -> list[web.RouteDef]:
        """Return the route table; whatever is not in it does not exist from outside."""
        return [
            *self._names.routes(),
            web.get("/metrics", self.metrics),
            *(web.post(route.path, partial(self.forward, route)) for route in self._dialect.routes),
        ]

    async def metrics(self, request: web.Request) -> web.Response:
        """Show the engine's own metrics, which nobody else could ask for."""
        headers = {"Accept": request.headers.get("Accept", "*/*"), "Accept-Encoding": "identity"}
        with self._upstream.call() as call:
            await call.send("GET", "/metrics", headers=headers.items())
            found = await call.answer()
            body = await found.gathered(limit=_METRICS_BYTES)
            return web.Response(status=found.status, headers=to_client(found.headers), body=body)

    async def forward(self, route: Route, request: web.Request) -> web.StreamResponse:
        """Have the engine compute something."""
        with self._places.take(), Outcome(self._metrics, clock=self._clock, on_lost=self._lost) as outcome:
            raw = await read_bytes(request)
            asked = await _aside(len(raw), partial(rewriting.read, raw, route, self._dialect))
            name = rewriting.our_name(asked.model, served=self._settings.served_model_name, dialect=self._dialect)
            self._names.require(name)
            request_id = f"modelswap-{secrets.token_hex(12)}"
            required = request.headers.get(REQUIRE_HEADER)
            async with (
                self._coordinator.admission(require_version=required, request_id=request_id) as admission,
                self._names.adapter(name) as entry,
            ):
                outcome.let_in(admission.live)
                guest = _Guest(request_id, route, asked, len(raw), admission.live, entry)
                with self._flights.begin() as flight:
                    admission.submitted()
                    return await self._exchange(request, guest, flight, outcome)

    async def _exchange(
        self, request: web.Request, guest: "_Guest", flight: Flight, outcome: Outcome
    ) -> web.StreamResponse:
        with self._upstream.call() as call:
            async with flight:
                body = await _aside(guest.size, partial(self._written, guest))
                if not self._coordinator.serves(guest.live.digest):
                    raise NotReady("another version was loaded while the request was read", advice="send it again")
                headers = to_engine(request.headers, request_id=guest.id)
                await call.send("POST", guest.route.path, headers=headers, body=body)
                # What follows is done while the engine works.
                outcome.sent()
                exchange = Exchange(
                    flight=flight,
                    outcome=outcome,
                    renamer=self._renamer(guest),
                    headers=guest.headers(),
                    trusted=lambda: self._coordinator.trusted,
                    write_seconds=self._settings.write_seconds,
                )
                found = await call.answer()
            return await exchange.answer(request, found)

    def _written(self, guest: "_Guest") -> bytes:
        salt = guest.live.digest.removeprefix("sha256:")
        return rewriting.write(
            guest.asked, guest.route, self._dialect, base=self._base(), adapter=guest.adapter, salt=salt
        )

    def _renamer(self, guest: "_Guest") -> rewriting.Renamer:
        engine = rewriting.engine_name(self._base(), guest.adapter, self._dialect)
        return rewriting.Renamer(engine=engine, client=guest.asked.model or self._settings.served_model_name)

    def _lost(self) -> None:
        self._on_lost()
        self._coordinator.worker_lost()


async def _aside(size: int, work: Callable[[], T]) -> T:
    """Do it at once, or beside the event loop where it would hold that up."""
    return work() if size <= _LARGE else await asyncio.to_thread(work)
