"""Adapters read within bounds: found, vouched for, held against the base, hashed; or said to have taken too long.

It knows the engine's layout and no adapter that the engine has.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import msgspec

from modelswap_engine.backends.adapters import AdapterHost
from modelswap_engine.lora.reading import Fitting, Opener, Read, look, open_fitting, read
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.lora.terms import OnTerms, settled
from modelswap_engine.lora.vouching import Vouching
from modelswap_engine.protocol.adapter_calls import ResolveAdaptersRequest, ResolvedAdapter, ResolvedAdapters
from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.errors import BadRequest, ModelswapError, Unavailable
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.swap.clock import Clock, within

T = TypeVar("T")
TOGETHER_SECONDS: Final = 20.0
"""How long one of several sources that are looked up together may take."""


class Reader:
    """Reads adapters for one engine.

    Args:
        host: the engine.
        opener: finds adapters by URI.
        vouching: who must vouch for them.
        clock: time.
        settings: bounds, and the name of the base.
    """

    def __init__(
        self, *, host: AdapterHost, opener: Opener, vouching: Vouching, clock: Clock, settings: LoraSettings
    ) -> None:
        self._host, self._opener, self._vouching = host, opener, vouching
        self._clock, self._settings = clock, settings

    def check_name(self, name: str) -> None:
        """Refuse the name of the base.

        Raises:
            BadRequest: it is that.
        """
        if name == self._settings.served_model_name:
            raise BadRequest(f"{name} is the name of the base model", advice="give the adapter a name of its own")

    async def open(self, source: OnTerms) -> Fitting:
        """Find an adapter that fits; see :func:`reading.open_fitting`.

        Raises:
            ModelswapError: there is none, or it cannot be served here; or not in time.
        """
        return await self._within(source.name, self._opening(source), self._settings.load_seconds)

    async def read(self, source: OnTerms, operation_id: str) -> Read:
        """Read an adapter to its end; see :func:`reading.read`.

        Raises:
            ModelswapError: it cannot be served here; or not in time.
        """
        return await self._within(source.name, self._reading(source, operation_id), self._settings.load_seconds)

    async def resolve(self, request: ResolveAdaptersRequest) -> ResolvedAdapters:
        """Say what sources hold, and whether it could be served here; nothing is loaded.

        Of several none keeps the answer back for long: what takes its time is to be asked for by itself.
        """
        seconds, together = self._settings.load_seconds, len(request.sources) > 1
        bound = min(seconds, TOGETHER_SECONDS) if together else seconds
        return ResolvedAdapters(
            adapters=await asyncio.gather(*(self._resolve(source, bound) for source in request.sources))
        )

    async def _resolve(self, source: AdapterSource, seconds: float) -> ResolvedAdapter:
        found = ResolvedAdapter(name=source.name, uri=source.uri, base_digest=source.base_digest)
        try:
            self.check_name(source.name)
            content = (await self._within(source.name, self._reading(settled(source), "resolve"), seconds)).content
        except ModelswapError as error:
            return msgspec.structs.replace(found, error=error.body())
        return msgspec.structs.replace(found, digest=content.digest, rank=content.rank, bytes=content.nbytes)

    async def look(self, request: LookRequest) -> SourceLook:
        """Say whether an adapter's source still holds it; see :func:`reading.look`.

        Raises:
            ModelswapError: it cannot be told now.
        """
        ref, seconds = request.target, self._settings.load_seconds
        return await self._within(ref.version, look(self._opener, ref, known=request.known), seconds)

    async def _reading(self, source: OnTerms, operation_id: str) -> Read:
        return await read(await self._opening(source), operation_id=operation_id)

    def _opening(self, source: OnTerms) -> Coroutine[Any, Any, Fitting]:
        return open_fitting(self._opener, source, self._host.adapters(), vouching=self._vouching)

    async def _within(self, name: str, work: Coroutine[Any, Any, T], seconds: float) -> T:
        try:
            return await within(self._clock, seconds, work)
        except TimeoutError:
            raise Unavailable(
                f"adapter {name} was not read within {seconds:g} s", advice="check its source, and the way there"
            ) from None
