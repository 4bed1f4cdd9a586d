"""Which version an engine holds, which is staged, which is retained, and the folders that belong to them.

It asks no engine: whoever does writes here what came of it.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from modelswap_engine.backends.external.plain.adopt import Found
from modelswap_engine.backends.external.plain.live import Held, Retained, Staged
from modelswap_engine.backends.external.plain.staging import Staging
from modelswap_engine.backends.external.plain.sums import Sums
from modelswap_engine.backends.port import Stage, StageRetained
from modelswap_engine.protocol.errors import Busy, Internal, NotFound


class Book:
    """The versions of one engine.

    Args:
        staging: writes and removes folders.
        in_use: a folder that the engine may look at still; None for none.

    Attributes:
        target: what is live, or is to be proved to be live; None while nothing was loaded.
        proven: digest of what was proved to be live, "" while nothing is.
        staged: the exchange that is ready.
        retained: the version before.
    """

    def __init__(self, staging: Staging, *, in_use: Callable[[], Path | None] = lambda: None) -> None:
        self._staging = staging
        self._in_use = in_use
        self.target: Held | None = None
        self.proven = ""
        self.staged: Staged | None = None
        self.retained: Retained | None = None
        self._prepared = ""
        self._committed = ""
        self._answered_well = False

    def clear(self) -> None:
        """Nothing is known."""
        self.target, self.proven, self.staged, self.retained = None, "", None, None

    def took(self, held: Held) -> None:
        """A version was loaded and proved; all that was before is forgotten."""
        self.target, self.proven, self.staged, self.retained = held, held.digest, None, None

    def numbers(self) -> list[int]:
        """Return the numbers of the ranks."""
        return sorted(self.target.sums) if self.target is not None else [0]

    def ends(self) -> list[Held]:
        """Return the versions that may be live."""
        staged = [self.staged.before, self.staged.after] if self.staged is not None else []
        return [*([self.target] if self.target is not None else []), *staged]

    def of(self, operation_id: str) -> Staged:
        """Return what is staged for an operation.

        Raises:
            NotFound: nothing is.
        """
        if self.staged is None or self.staged.operation_id != operation_id:
            raise NotFound(f"nothing is staged for operation {operation_id}", advice="stage it again")
        return self.staged

    def prepare(self, operation_id: str) -> Staged:
        """Note that what is staged for an operation may be committed, and return it.

        Raises:
            NotFound: nothing is staged for it.
        """
        staged = self.of(operation_id)
        self._prepared = operation_id
        return staged

    def prepared(self, operation_id: str) -> Staged:
        """Return what may be committed.

        Raises:
            NotFound: nothing is staged for the operation, or it was not prepared.
        """
        staged = self.of(operation_id)
        if self._prepared != operation_id:
            raise NotFound(f"operation {operation_id} is not prepared", advice="prepare it again")
        return staged

    def committed(self, staged: Staged) -> None:
        """Note that an exchange is made, or may be, and is not proved."""
        self.target, self.proven, self._committed = staged.after, "", staged.operation_id
        self._answered_well = False

    def answered_well(self) -> None:
        """Note that the engine said of the exchange that is made that all went well."""
        self._answered_well = True

    @property
    def loaded(self) -> Staged | None:
        """The exchange that is live by what the engine answered; None where only checksums can tell what is."""
        staged = self.staged
        return staged if staged is not None and self.target is staged.after and self._answered_well else None

    def undoable(self, operation_id: str) -> Staged | None:
        """Return what an operation has exchanged, None when it has exchanged nothing.

        Raises:
            Busy: it did, and what undid that was given up.
        """
        if self._committed != operation_id:
            return None
        if self.staged is None or self.staged.operation_id != operation_id:
            raise Busy(
                f"the commit of operation {operation_id} can no longer be undone", advice="load the wanted version"
            )
        return self.staged

    def undone(self, staged: Staged) -> None:
        """Note that an exchange was taken back; that is not proved."""
        self.target, self.proven, self._committed = staged.before, "", ""
        self._answered_well = False

    async def stage(self, order: Stage | StageRetained, found: Found, *, recalled: Mapping[int, Sums]) -> Staged:
        """Write the folders of an exchange.

        Raises:
            Internal: what is live is not proved.
            NotFound: the version is not retained.
            ModelswapError: see :class:`Staging`.
        """
        live = self.target
        if live is None or self.proven != live.digest:
            raise Internal("what the engine holds is not proved, so nothing can be staged beside it")
        self.staged, self._prepared = None, ""
        if isinstance(order, StageRetained):
            if self.retained is None:
                raise NotFound(f"version {order.digest} is not retained", advice="swap to it from its source")
            self.staged = await self._staging.stage_retained(order, self.retained, live, found)
        else:
            self.retained = None if order.drop_previous else self.retained
            self.staged = await self._staging.stage(order, live, found, recalled=recalled)
        return self.staged

    def release(self, operation_id: str, *, previous: bool) -> None:
        """Drop what is staged for an operation; of one that was committed, what it replaced is retained."""
        staged = self.staged
        if staged is not None and staged.operation_id == operation_id:
            self.staged = None
            if self.target is staged.after:
                self.retained = Retained(held=staged.before, folder=staged.back, tensors=staged.undo.tensors)
        if previous:
            self.retained = None

    async def prune(self) -> None:
        """Remove the folders that nothing leads to any more."""
        staged, retained = self.staged, self.retained
        keep = {staged.there, staged.back} if staged is not None else set()
        keep |= {retained.folder} if retained is not None else set()
        await asyncio.to_thread(self._prune, keep)

    def _prune(self, keep: set[Path]) -> None:
        used = self._in_use()
        self._staging.prune(keep | ({used} if used is not None else set()))
