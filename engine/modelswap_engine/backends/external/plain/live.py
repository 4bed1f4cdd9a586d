"""What an engine must hold: values of the plain route. They say where bytes lie and what checksums must be."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from modelswap_engine.backends.external.folder import Written, stamp_of
from modelswap_engine.backends.external.plain.sums import Sums, Verdict, judge
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.protocol.errors import SourceChanged

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A version, as an engine holds or must hold it.

    ``tensors`` are all of its tensors by name, ``sums`` the checksums of each rank; one that is "" is not known.
    """

    digest: str
    directory: Path
    tensors: Mapping[str, TensorRange]
    sums: Mapping[int, Sums]

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parameters of which no checksum is known."""
        return tuple(sorted({name for sums in self.sums.values() for name, value in sums.items() if not value}))

    def confirmed(self, live: Mapping[int, Sums]) -> dict[int, dict[str, str]]:
        """Return what every rank shows without that of which nothing was known: it agrees with nothing."""
        return {
            rank: {name: value if self.sums[rank].get(name) else "" for name, value in sums.items()}
            for rank, sums in live.items()
        }

    def judge(self, live: Mapping[int, Sums]) -> Verdict:
        """Compare with what every rank shows."""
        if live.keys() != self.sums.keys():
            return Verdict(wrong=("ranks",))
        verdicts = [judge(live[rank], sums) for rank, sums in self.sums.items()]
        return Verdict(
            wrong=tuple(sorted({name for verdict in verdicts for name in verdict.wrong})),
            unseen=tuple(sorted({name for verdict in verdicts for name in verdict.unseen})),
        )


@dataclass(frozen=True, kw_only=True)
class Staged:
    """An exchange that is ready: the folders for the way there and back, and what is live at either end."""

    operation_id: str
    there: Path
    stamp: tuple[int, ...]
    back: Path
    undo: Written
    before: Held
    after: Held
    nbytes: int

    async def require_untouched(self) -> None:
        """See that the tensors on the way there are those that were proved.

        Raises:
            SourceChanged: somebody wrote to them since.
        """
        if await asyncio.to_thread(stamp_of, self.there) != self.stamp:
            raise SourceChanged(
                f"{self.there} changed after it was proved", advice="see who else writes to the volume; then try again"
            )


@dataclass(frozen=True, kw_only=True)
class Retained:
    """The previous version: what it was, and the tensors by which it differs from the live one, in our own folder."""

    held: Held
    folder: Path
    tensors: tuple[TensorRange, ...]


async def in_thread(work: Callable[..., T], *arguments: Any, stop: threading.Event, **keywords: Any) -> T:
    """Run blocking work that looks at ``stop`` away from the event loop; being cancelled sets it."""
    try:
        return await asyncio.to_thread(work, *arguments, stop=stop, **keywords)
    except asyncio.CancelledError:
        stop.set()
        raise
