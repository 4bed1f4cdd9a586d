"""What a commit does with running requests and with the KV cache, on the generation loop's own structures.

Everything here is only legal while the loop is parked between two steps. It reaches into transformers' scheduler and
cache, because the library has no call for it; what is reached into is kept to this one file.
"""

from collections.abc import Container, Iterable
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus

from modelswap_engine.protocol.errors import Internal


def running(processor: Any, known: Container[str]) -> int:
    """Return how many requests hold KV, after dropping the ones that are no longer ``known``.

    A cancellation that the loop has not seen yet must not count as a running request.
    """
    scheduler = processor.scheduler
    for request_id in [*scheduler.active_requests, *scheduler.waiting_requests]:
        if request_id not in known:
            scheduler.set_request_cancellation(request_id)
    scheduler.clear_cancelled_requests()
    return len(scheduler.active_requests)


def cancel(processor: Any, request_ids: Iterable[str]) -> None:
    """Take requests out of the loop."""
    for request_id in request_ids:
        processor.scheduler.set_request_cancellation(request_id)
    processor.scheduler.clear_cancelled_requests()


def requeue(processor: Any) -> int:
    """Turn every running request into a waiting one that has its tokens in its prompt, ahead of those that wait."""
    scheduler = processor.scheduler
    active = list(scheduler.active_requests.items())
    for request_id, state in reversed(active):
        again = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED
        scheduler.finish_request(request_id)
        scheduler.waiting_requests[request_id] = again
        scheduler.waiting_requests_order.appendleft(request_id)
    return len(active)


def empty_cache(processor: Any) -> None:
    """Forget every block and every prefix; nothing may be running any more.

    Raises:
        Internal: blocks are still taken afterwards; the cache cannot be trusted.
    """
    cache, scheduler = processor.cache, processor.scheduler
    cache.reset()
    scheduler.starved_requests = []
    scheduler.block_new_requests = False
    free, total = int(cache.pool.num_free_sectors), int(cache.num_sectors)
    tables = sum(len(allocator.block_table) for allocator in cache.cache_allocators.values())
    if free != total or tables or scheduler.active_requests:
        raise Internal(f"the KV cache was not emptied: {free} of {total} sectors free, {tables} tables left")
