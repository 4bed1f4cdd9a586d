"""Who is inside: a reader/writer lock in which requests are the readers and the swap is the writer.

The writer is preferred: once it has claimed the lock, nobody enters. A reader is *admitting* until its prompt has been
handed to the engine and *submitted* afterwards, because only some modes must wait for the whole answer. Waits end by
cancellation; callers bound them with ``clock.within``.
"""

from enum import Enum, auto

from modelswap_engine.swap.clock import Clock
from modelswap_engine.swap.sleepers import Sleepers


class Scope(Enum):
    """Which readers a writer waits for."""

    ADMITTING = auto()
    ALL = auto()


class Reader:
    """One request inside.

    Attributes:
        request_id: who it is.
        since: the clock's reading when it entered.
        version: the digest of the version that it was let in to; it holds that version's instance.
        submitted: True once the engine has its prompt.
    """

    __slots__ = ("_lock", "request_id", "since", "submitted", "version")

    def __init__(self, lock: "UpdateLock", since: float, request_id: str) -> None:
        self._lock = lock
        self.request_id = request_id
        self.since = since
        self.submitted = False
        self.version = ""

    def submit(self) -> None:
        """The prompt has reached the engine; from now on only a writer that waits for all waits for this."""
        self.submitted = True
        self._lock._sleepers.wake()

    def leave(self) -> None:
        """The request is over; leaving twice does no harm."""
        self._lock._readers.pop(self, None)
        self._lock._sleepers.wake()


class UpdateLock:
    """The lock.

    Attributes:
        writer: who has claimed it, "" when nobody has; ``writer_since`` is the clock's reading then.
        entered: how many readers have come in so far.
    """

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._readers: dict[Reader, None] = {}  # in order of entry
        self._claimed = False
        self.writer = ""
        self.writer_since = 0.0
        self.entered = 0
        self._sleepers = Sleepers()

    @property
    def claimed(self) -> bool:
        """True while a writer is inside or waits to be."""
        return self._claimed

    @property
    def inside(self) -> int:
        """How many readers there are."""
        return len(self._readers)

    @property
    def oldest_seconds(self) -> float:
        """The age of the oldest reader; 0 without any."""
        first = next(iter(self._readers), None)
        return 0.0 if first is None else self._clock.monotonic() - first.since

    def readers(self) -> tuple[Reader, ...]:
        """Return who is inside, the oldest first."""
        return tuple(self._readers)

    async def enter(self, request_id: str = "") -> Reader:
        """Become a reader, after any writer."""
        while self._claimed:
            await self._sleepers.sleep()
        reader = Reader(self, self._clock.monotonic(), request_id)
        self._readers[reader] = None
        self.entered += 1
        return reader

    def claim(self, writer: str = "") -> None:
        """Become the writer: nobody enters any more. Those inside still are; see :meth:`idle`.

        Raises:
            RuntimeError: there is a writer already; the caller's mutex is broken.
        """
        if self._claimed:
            raise RuntimeError("the update lock has a writer already")
        self._claimed, self.writer, self.writer_since = True, writer, self._clock.monotonic()

    def release(self) -> None:
        """Stop being the writer."""
        self._claimed, self.writer = False, ""
        self._sleepers.wake()

    def holding(self, version: str) -> int:
        """How many readers hold the instance of a version."""
        return sum(reader.version == version for reader in self._readers)

    async def idle(self, scope: Scope) -> None:
        """Return when no reader of this scope is inside."""
        while any(scope is Scope.ALL or not reader.submitted for reader in self._readers):
            await self._sleepers.sleep()

    async def unheld(self, version: str) -> None:
        """Return when no reader holds the instance of a version."""
        while self.holding(version):
            await self._sleepers.sleep()
