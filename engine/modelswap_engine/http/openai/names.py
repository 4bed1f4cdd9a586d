"""The model names of a data port: the base, the adapters on it, and what requests that name another one are told."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext

from aiohttp import web

from modelswap_engine.http.bodies import json_response
from modelswap_engine.http.openai import bodies
from modelswap_engine.http.openai.errors import ModelNotFound
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.entries import Entry
from modelswap_engine.protocol.adapters import AdapterStatus
from modelswap_engine.protocol.errors import AdapterNotFound
from modelswap_engine.swap.coordinator import Coordinator


class Names:
    """The names.

    Args:
        served: the base's.
        coordinator: says which version of it is live.
        adapters: those on the base; None when there are none.
        since: what is said of when they were made, in seconds since 1970.
    """

    def __init__(self, served: str, *, coordinator: Coordinator, adapters: AdapterDesk | None, since: int) -> None:
        self._served = served
        self._coordinator = coordinator
        self._adapters = adapters
        self._since = since

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        return [web.get("/v1/models", self.models), web.get("/v1/models/{model:.+}", self.model)]

    async def models(self, _: web.Request) -> web.Response:
        """List the base with the version that is live, and the adapters on it."""
        adapters = self._adapters.registered() if self._adapters is not None else ()
        return json_response(bodies.ModelList(data=[self._card(), *map(self._adapter_card, adapters)]))

    async def model(self, request: web.Request) -> web.Response:
        """Describe the base or an adapter."""
        name = request.match_info["model"]
        self.require(name)
        if name == self._served or self._adapters is None:
            return json_response(self._card())
        return json_response(self._adapter_card(self._adapters.status(name)))

    def require(self, name: str) -> None:
        """Look whether a name leads anywhere.

        Raises:
            ModelNotFound: it does not.
        """
        if name != self._served and not (self._adapters is not None and self._adapters.has(name)):
            raise self._no_model(name)

    def adapter(self, name: str) -> AbstractAsyncContextManager[Entry | None]:
        """Return a context with the adapter that a model name asks for, None for the base; never the base in its place.

        Raises:
            ModelNotFound: on entering, the name leads nowhere any more.
            SlotsBusy, NotReady, WorkerLost: on entering, not now.
        """
        if self._adapters is None or name == self._served:
            return nullcontext()
        return self._use(name, self._adapters)

    @asynccontextmanager
    async def _use(self, name: str, adapters: AdapterDesk) -> AsyncIterator[Entry]:
        async with AsyncExitStack() as stack:
            try:
                entry = await stack.enter_async_context(adapters.use(name))
            except AdapterNotFound:
                raise self._no_model(name) from None
            yield entry

    def _no_model(self, name: str) -> ModelNotFound:
        return ModelNotFound(
            f"the model {name[:200]!r} does not exist",
            advice=f"use {self._served!r}, or an adapter that GET /v1/models lists",
            details={"param": "model"},
        )

    def _card(self) -> bodies.ModelCard:
        live = self._coordinator.live
        return bodies.ModelCard(
            id=self._served,
            created=self._since,
            version=live.version if live else "",
            digest=live.digest if live else "",
        )

    def _adapter_card(self, status: AdapterStatus) -> bodies.ModelCard:
        return bodies.ModelCard(id=status.name, created=self._since, digest=status.digest, parent=self._served)
