"""Room in the content store, which is given back also when whoever asked for it goes away while it is made."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from modelswap_engine.store.content import ContentStore
from modelswap_engine.store.incoming import Incoming


@asynccontextmanager
async def expected(store: ContentStore, blobs: Sequence[tuple[str, int]]) -> AsyncIterator[list[Incoming]]:
    """Give what blobs (sha256, bytes) are written to; what was not accepted by the end is removed.

    Raises:
        InsufficientDisk: the store cannot hold them.
    """
    making = asyncio.ensure_future(asyncio.to_thread(store.expect, blobs))
    try:
        coming = await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(lambda done: _give_back(store, done))
        raise
    try:
        yield coming
    finally:
        await asyncio.shield(asyncio.to_thread(store.give_up, coming))


def _give_back(store: ContentStore, made: "asyncio.Task[list[Incoming]]") -> None:
    if not made.cancelled() and made.exception() is None:
        threading.Thread(target=store.give_up, args=[made.result()], name="give-back").start()
