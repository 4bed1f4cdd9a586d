"""A load that runs in a thread of its own, for a caller that spends its time waiting for commands."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

from demo.answers import Summary
from demo.load import Load


class BackgroundLoad:
    """Runs a load from entering the context until leaving it."""

    def __init__(self, url: str, *, model: str, streams: int = 4, max_tokens: int = 16) -> None:
        self._url, self._model, self._streams, self._max_tokens = url, model, streams, max_tokens
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load", daemon=True)
        self._load: Load | None = None

    def __enter__(self) -> Self:
        """Start the clients."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let requests in flight end; after an error, just stop."""
        load = self._running()
        try:
            asyncio.run_coroutine_threadsafe(load.__aexit__(kind, error, trace), self._loop).result()
            asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def summary(self) -> Summary:
        """Return what ended so far."""
        return self._running().summary()

    def served_more(self, count: int, *, timeout: float = 300.0) -> None:
        """Wait until so many more requests that begin from now on were served.

        Raises:
            TimeoutError: they were not.
        """
        waiting = asyncio.run_coroutine_threadsafe(self._running().served_more(count), self._loop)
        try:
            waiting.result(timeout)
        except TimeoutError:
            waiting.cancel()
            now = self.summary()
            raise TimeoutError(
                f"{count} more requests were not served within {timeout:.0f} s "
                f"({now.served} served so far, {now.failed} failed)"
            ) from None

    async def _start(self) -> None:
        self._load = Load(self._url, model=self._model, streams=self._streams, max_tokens=self._max_tokens)
        await self._load.__aenter__()

    async def _settle(self) -> None:
        """Let what the client library finalises by itself end before its loop does."""
        await self._loop.shutdown_asyncgens()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    def _running(self) -> Load:
        if self._load is None:
            raise RuntimeError("the load has not been started")
        return self._load
