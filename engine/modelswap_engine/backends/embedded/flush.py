"""What a commit does with running requests and with the KV cache, on the generation loop's own structures.

Everything here is only legal while the loop is parked between two steps. It reaches into transformers' scheduler and
cache, because the library has no call for it; what is reached into is kept to this one file.
"""

from collections.abc import Container
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


def counted(processor: Any, known: Container[str]) -> int:
    """Return how many known requests hold KV, and leave the others where they are.

    For the ranks of a split model, where what one rank drops the others would go on with: a cancellation takes its way
    through the loop, which all of them follow.
    """
    return sum(request_id in known for request_id in processor.scheduler.active_requests)


def cancel_all(processor: Any) -> None:
    """Take every request out of the loop."""
    scheduler = processor.scheduler
    for request_id in [*scheduler.active_requests, *scheduler.waiting_requests]:
        scheduler.set_request_cancellation(request_id)
    scheduler.clear_cancelled_requests()


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


def freeze(processor: Any) -> list[str]:
    """Leave running requests their pages and hide all pages from everybody else; return who keeps pages.

    Pages that nobody uses go back to the pool. Those in use go there when their requests end, because a page without a
    key is never kept for others.

    Raises:
        Internal: pages are lost or counted twice afterwards; the cache cannot be trusted.
    """
    cache = processor.cache
    cache.evict_cached_blocks()
    for allocator in cache.cache_allocators.values():
        allocator.ledger.hash_to_block.clear()
        allocator.ledger.block_to_hash.clear()
    held = sum(
        len({page for table in allocator.block_table.values() for page in table}) * allocator.bytes_per_block
        for allocator in cache.cache_allocators.values()
    )
    free, total = free_bytes(cache), cache.num_sectors * cache.bytes_per_sector
    if free + held != total:
        raise Internal(f"the KV cache does not add up: {free} bytes free and {held} in use, of {total}")
    return list(processor.scheduler.active_requests)


def free_bytes(cache: Any) -> int:
    """Return what requests could take at once, without giving up pages that are kept for others."""
    return int(cache.compute_free_capacity(relative=False))


def cached_bytes(cache: Any) -> int:
    """Return what is kept for others although no request uses it."""
    return sum(
        len(allocator.ledger.cached_blocks) * int(allocator.bytes_per_block)
        for allocator in cache.cache_allocators.values()
    )


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
