"""Exchanging tensors of an SGLang without requests by a folder, and learning what is live when it did not say so.

An update that SGLang calls failed can have changed every weight, some, or none: what is live afterwards is read from
its checksums, never from its answer. The path it is given is always the same symbolic link: the path of the last update
becomes the name of its model.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external.folder import point
from modelswap_engine.backends.external.plain.live import Held
from modelswap_engine.backends.external.plain.sums import Sums
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.protocol.errors import BadRequest, DigestMismatch, Unverifiable, WorkerLost

log: Final = logging.getLogger("modelswap.sglang")
LINK: Final = "model"
"""Name of the link in the folder that is shared with the engine."""

_NAMED: Final = 3


class Exchange:
    """The calls that change weights, and the one that reads their checksums.

    Args:
        control: of the engine.
        folder: shared with the engine under the same path.
        restart: told when the engine must not go on.
        settings: bounds.
        experimental: take a version as proved of which some parameters could not be seen.
    """

    def __init__(
        self,
        control: SglangControl,
        *,
        folder: Path,
        restart: RestartWish,
        settings: ExternalSettings,
        experimental: bool,
    ) -> None:
        self._control = control
        self._link = folder / LINK
        self._restart = restart
        self._settings = settings
        self._experimental = experimental

    def linked(self) -> Path | None:
        """Return where the link leads, which SGLang may look at still; None where there is none yet. Blocks."""
        return self._link.readlink() if self._link.is_symlink() else None

    async def observe(self) -> dict[int, Sums]:
        """Return the checksums of every rank."""
        checked = await self._control.checksums(seconds=self._settings.hash)
        return {rank.rank: rank.checksums for rank in checked.ranks}

    async def apply(self, folder: Path, wanted: Held) -> bool:
        """Load the tensors of a folder over the live ones, so that ``wanted`` is live, and flush the cache.

        Returns whether the engine said so; else it was found out.

        Raises:
            BadRequest: ``wanted`` is not live; the weights from before are, or a mixture.
            WorkerLost: the engine died, or holds a cache of other weights; a restart is wanted.
        """
        await asyncio.to_thread(point, self._link, folder)
        try:
            done = await self._control.update(str(self._link), wanted.digest, seconds=self._settings.load)
        except WorkerLost as error:
            self._restart.want(error.message, boot_id=self._control.boot_id)
            raise
        if done.success:
            return True
        log.warning("an update was answered as failed, its outcome is looked at: %s", done.message)
        live = await self.observe()
        if wanted.judge(live).wrong:
            raise BadRequest(
                f"SGLang did not load {wanted.digest}: {done.message}", advice="look at the engine's log for the reason"
            )
        if not await self._control.flush(seconds=self._settings.load):
            self._restart.want("SGLang holds cached keys and values of older weights", boot_id=self._control.boot_id)
            raise WorkerLost(f"SGLang did not flush its cache: {done.message}", advice="it will be restarted")
        await self._control.set_version(wanted.digest, seconds=self._settings.load)
        return False

    def require(self, wanted: Held, live: Mapping[int, Sums]) -> None:
        """Hold checksums against a version.

        Raises:
            DigestMismatch: a parameter is not the version's.
            Unverifiable: nothing contradicts it, but some parameters cannot be seen.
        """
        verdict = wanted.judge(live)
        if verdict.wrong:
            raise DigestMismatch(
                f"{_list(verdict.wrong)} in SGLang: not that of {wanted.digest}",
                advice="the old weights are put back; look at the engine's log if it happens again",
                details={"tensor": verdict.wrong[0]},
            )
        if verdict.unseen and not self._experimental:
            raise Unverifiable(
                f"{_list(verdict.unseen)} in SGLang: no checksum is known for {wanted.digest}",
                advice="start the engine on this version once, or allow what cannot be proved as experimental",
                details={"tensor": verdict.unseen[0]},
            )


def _list(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{more}"
