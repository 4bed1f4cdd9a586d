"""Whose work a cached page of keys and values is: only requests of one version and one adapter share pages.

The library's own key is the tokens of the prompt, which any version and any adapter would match. Here a key begins with
who computed the page. A barred request neither finds pages nor leaves any to be found, which is how requests that keep
old pages across a change of weights are kept from passing them on. Everything follows from the request's id and from
what every rank knows, so that all ranks share alike. Knows nothing of swaps.
"""

import functools
import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from modelswap_engine.backends.embedded.wire import adapter_of

_KEY_BYTES: Final = 16
"""Long enough that nobody finds two prompts with the same key."""


class PrefixKeys:
    """The keys of the pages of one cache; the cache's own look-up and registration go through here from now on.

    Args:
        cache: the paged cache of one generation loop, before its first step.
        version: returns the digest of the weights that compute now; called by the generation thread.
    """

    def __init__(self, cache: Any, *, version: Callable[[], str]) -> None:
        self._version = version
        self._barred: set[str] = set()
        self._asking = ""
        self._look_up = cache.search_prefix_match
        cache.search_prefix_match = self._search
        for allocator in cache.cache_allocators.values():
            allocator.match_prefix_blocks = functools.partial(self._match, allocator)
            allocator.mark_complete_blocks = functools.partial(self._register, allocator)

    def bar(self, request_ids: Iterable[str]) -> None:
        """From now on these requests share nothing. It replaces who was barred before: that is over, or among them."""
        self._barred = set(request_ids)

    def ended(self, request_id: str) -> None:
        """A request is over, and with it what was remembered of it."""
        self._barred.discard(request_id)

    def _seed(self, request_id: str) -> bytes | None:
        if request_id in self._barred:
            return None
        return _digest(self._version().encode(), b"\0", adapter_of(request_id).encode())

    def _search(self, request_id: str, prompt: list[int]) -> int:
        self._asking = request_id
        return int(self._look_up(request_id, prompt))

    def _match(self, allocator: Any, prompt: Sequence[int]) -> list[int]:
        """Return the pages that hold the longest known beginning of a prompt, never all of it."""
        key, found, size = self._seed(self._asking), [], allocator.tokens_per_page
        if key is None:
            return []
        for end in range(size, len(prompt), size):
            key = _digest(key, _raw(prompt[end - size : end]))
            page = allocator.ledger.hash_to_block.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def _register(self, allocator: Any, request_id: str, tokens: Sequence[int], completed: int) -> None:
        """Make the pages findable that the last step completed; one that is there already is shared instead."""
        key = self._seed(request_id)
        if key is None:
            return
        ledger, table, size = allocator.ledger, allocator.block_table[request_id], allocator.tokens_per_page
        for index, page in enumerate(table):
            known = ledger.block_to_hash.get(page)
            if known is None:
                content = tokens[index * size : (index + 1) * size]
                if not completed or len(content) < size:
                    return
                completed -= 1
                known = _digest(key, _raw(content))
                same = ledger.register_new_hash(page, known)
                if same is not None:
                    ledger.acquire(same)
                    table[index] = same
                    if ledger.release(page):
                        allocator.pool.free_blocks(allocator.index, [page])
            key = known


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=_KEY_BYTES).digest()


def _raw(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
