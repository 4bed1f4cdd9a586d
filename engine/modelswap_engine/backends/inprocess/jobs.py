"""Work that is too long for the thread in which an engine computes: one piece at a time, in a thread that gives way.

What such a thread finds out counts only once the engine's own thread takes it. A source may hang for good, and a thread
that reads it cannot be stopped; it is left behind then, and whatever it may still find counts for nothing.
"""

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from modelswap_engine.protocol.errors import SourceUnreadable
from modelswap_engine.weights.pace import Pace, lower_priority

T = TypeVar("T")
MOST_LEFT: Final = 4


class Counting(Pace):
    """A pace that remembers how many bytes went by."""

    def __init__(
        self,
        *,
        bytes_per_second: int = 0,
        niceness: int = 0,
        share: float = 1.0,
        busy: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(bytes_per_second=bytes_per_second, niceness=niceness, share=share, busy=busy)
        self.nbytes = 0

    def spend(self, nbytes: int) -> None:
        """Account for some more.

        Raises:
            Cancelled: the work was called off.
        """
        super().spend(nbytes)
        self.nbytes += nbytes


class Job(Generic[T]):
    """One piece of work in a thread of its own.

    Args:
        work: what to do; it changes nothing that anybody else looks at.
        pace: how fast, and by what it is called off.
    """

    def __init__(self, work: Callable[[Pace], T], pace: Counting) -> None:
        self.pace = pace
        self._work = work
        self._over = threading.Event()
        self._found: T | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="modelswap", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            lower_priority(self.pace.niceness)
            self._found = self._work(self.pace)
        except BaseException as error:  # noqa: BLE001  # handed to whoever asks for the outcome
            self._error = error
        finally:
            self._over.set()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for its end, and say whether it came."""
        return self._over.wait(seconds)

    def outcome(self) -> T:
        """Return what a piece of work that is over has found, or raise what it raised."""
        if self._error is not None:
            raise self._error
        found: T | None = self._found
        return found  # type: ignore[return-value]


class LeftBehind:
    """Threads of work that was called off and still hangs."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def add(self, job: Job[T]) -> None:
        """Count one."""
        self._threads.append(job.thread)

    def refuse_to_pile_up(self) -> None:
        """Let no more begin where too many hang.

        Raises:
            SourceUnreadable: they do.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MOST_LEFT:
            raise SourceUnreadable(
                f"{len(self._threads)} earlier readings still hang in their sources",
                advice="bring the volumes of the checkpoints back, or restart the engine",
            )
