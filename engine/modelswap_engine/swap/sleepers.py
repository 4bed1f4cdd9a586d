"""Waiting for the next change of something, whatever it is: whoever is woken looks for himself whether it helps."""

import asyncio


class Sleepers:
    """Those who wait; the waits are bounded by whoever waits."""

    def __init__(self) -> None:
        self._sleeping: list[asyncio.Future[None]] = []

    async def sleep(self) -> None:
        """Return at the next :meth:`wake`."""
        sleeper = asyncio.get_running_loop().create_future()
        self._sleeping.append(sleeper)
        try:
            await sleeper
        finally:
            if sleeper in self._sleeping:
                self._sleeping.remove(sleeper)

    def wake(self) -> None:
        """Something has changed that could let somebody go on."""
        sleeping, self._sleeping = self._sleeping, []
        for sleeper in sleeping:
            if not sleeper.done():
                sleeper.set_result(None)
