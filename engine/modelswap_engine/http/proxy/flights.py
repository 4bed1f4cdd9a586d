"""The requests that clients have in the engine: counted, and ended all at once when a swap says so."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from modelswap_engine.http.openai.errors import Interrupted
from modelswap_engine.protocol.errors import NotReady


class Flight:
    """One request that the engine has, or is about to have.

    As a context, which can be entered more than once, it is a leash: what is within is done unless the request is ended
    first. Leaving it raises:
        Interrupted: it was.
    """

    def __init__(self) -> None:
        self._ended = False
        self._leash: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        self._leash = asyncio.timeout(None)
        await self._leash.__aenter__()
        if self._ended:
            self._pull()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leash, self._leash = self._leash, None
        assert leash is not None  # noqa: S101
        try:
            await leash.__aexit__(kind, error, trace)
        except TimeoutError:
            if not self._ended:
                raise
            raise Interrupted(
                "the request was ended because the engine changes its weights", advice="send it again"
            ) from None

    def end(self) -> None:
        """End it."""
        self._ended = True
        self._pull()

    def _pull(self) -> None:
        if self._leash is not None:
            self._leash.reschedule(asyncio.get_running_loop().time())


class Flights:
    """All of them; a :class:`~modelswap_engine.backends.external.control.Requests`."""

    def __init__(self) -> None:
        self._flights: set[Flight] = set()
        self._bars = 0

    @contextmanager
    def begin(self) -> Iterator[Flight]:
        """Count one while the context lasts.

        Raises:
            NotReady: none may reach the engine now.
        """
        if self._bars:
            raise NotReady("the engine was lost, and is looked at", advice="send it again")
        flight = Flight()
        self._flights.add(flight)
        try:
            yield flight
        finally:
            self._flights.discard(flight)

    @contextmanager
    def barred(self) -> Iterator[None]:
        """Let none begin while the context lasts."""
        self._bars += 1
        try:
            yield
        finally:
            self._bars -= 1

    def running(self) -> int:
        """Say how many there are."""
        return len(self._flights)

    def end(self) -> int:
        """End them all, and say how many."""
        for flight in self._flights:
            flight.end()
        return len(self._flights)
