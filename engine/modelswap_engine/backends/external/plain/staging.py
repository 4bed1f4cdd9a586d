"""The folders of an exchange: there and back, and what is live at either end. Nothing here talks to the engine."""

import secrets
import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external.folder import Written, write_folder
from modelswap_engine.backends.external.plain.adopt import SHAPES_FILE, Found, shapes
from modelswap_engine.backends.external.plain.live import Held, Retained, Staged, in_thread
from modelswap_engine.backends.external.plain.preflight import check_fit, check_whole
from modelswap_engine.backends.external.plain.sums import Sums, after, worked_out
from modelswap_engine.backends.port import Stage, StageRetained, TensorRange
from modelswap_engine.protocol.errors import NotFound, Refused, SourceUnreadable, Unverifiable

_FOLDERS: Final = "exchanges"


class Staging:
    """Writes and removes folders.

    Args:
        folder: shared with the engine under the same path.
        experimental: stage what will not be proved as a whole.
    """

    def __init__(self, folder: Path, *, experimental: bool) -> None:
        self._folder = folder / _FOLDERS
        self._experimental = experimental
        self._stop = threading.Event()

    def stop(self) -> None:
        """End the writing that goes on."""
        self._stop.set()

    async def stage(self, order: Stage, live: Held, found: Found, *, recalled: Mapping[int, Sums]) -> Staged:
        """Write the tensors of a version, and those that they replace.

        Args:
            order: the tensors.
            live: what they replace.
            found: how the engine's parameters are made.
            recalled: remembered checksums of the version, by rank.

        Raises:
            Refused: the version does not fit, or its bytes are not fit to be used; nothing was touched.
            Unverifiable: what would be live could not be proved.
            Unavailable: not now; also when the tensors that go could not be put back.
        """
        check_fit(order.tensors, live.tensors)
        names = [item.name for item in order.tensors]
        check_whole(found.made, names)
        touched = found.made.touched(names)
        self._provable(order.digest, touched & found.converted, recalled)
        tensors = {**live.tensors, **{item.name: item for item in order.tensors}}
        there = await self._write(order.tensors, Path(order.directory), found, model=tensors)
        hashes = {name: item.sha256 for name, item in tensors.items()}
        known = worked_out(found.made, hashes, there.joined, digits=found.digits)
        target = Held(
            digest=order.digest,
            directory=Path(order.directory),
            tensors=tensors,
            sums={
                rank: after(sums, touched=touched, known=_known(known, found.converted, recalled.get(rank, {})))
                for rank, sums in live.sums.items()
            },
        )
        return await self._both_ways(order.operation_id, there, live, target, found)

    async def stage_retained(self, order: StageRetained, retained: Retained, live: Held, found: Found) -> Staged:
        """Write the tensors of the retained version anew from our own folder, proved once more."""
        if retained.held.digest != order.digest:
            raise NotFound(
                f"version {order.digest} is not retained, {retained.held.digest} is",
                advice="swap to it from its source",
            )
        there = await self._write(retained.tensors, retained.held.directory, found, model=retained.held.tensors)
        return await self._both_ways(order.operation_id, there, live, retained.held, found)

    async def write_differing(self, names: Collection[str], held: Held, found: Found) -> Path:
        """Write some tensors of a version, by the names of the parameters that are made of them."""
        wanted = sorted({source for name in names for source in found.made.sources[name]})
        written = await self._write([held.tensors[name] for name in wanted], held.directory, found, model=held.tensors)
        return _folder(written)

    def _provable(self, digest: str, converted: Collection[str], recalled: Mapping[int, Sums]) -> None:
        unseen = sorted(name for name in converted if not recalled or any(not s.get(name) for s in recalled.values()))
        if unseen and not self._experimental:
            raise Unverifiable(
                f"parameter {unseen[0]} (and {len(unseen) - 1} more) of the engine could not be proved to be {digest}: "
                "its checksum cannot be worked out from files, and none is remembered",
                advice="start an engine on this version once, or allow what cannot be proved as experimental",
                details={"tensor": unseen[0]},
            )

    async def _both_ways(self, operation_id: str, there: Written, before: Held, target: Held, found: Found) -> Staged:
        names = [item.name for item in there.tensors]
        try:
            back = await self._write(
                [before.tensors[name] for name in names], before.directory, found, model=before.tensors
            )
        except Refused as error:  # said of what serves now, not of the version that is to come
            raise SourceUnreadable(
                f"the files of version {before.digest}, which serves now, could not be read again for the way back: "
                f"{error.message}",
                advice="bring them back as they were, or start the engine on the new version",
            ) from error
        return Staged(
            operation_id=operation_id,
            there=_folder(there),
            stamp=there.stamp,
            back=_folder(back),
            undo=back,
            before=before,
            after=target,
            nbytes=there.nbytes,
        )

    async def _write(
        self, tensors: Sequence[TensorRange], side_files: Path, found: Found, *, model: Mapping[str, TensorRange]
    ) -> Written:
        names = {item.name for item in tensors}
        self._stop = threading.Event()
        return await in_thread(
            write_folder,
            self._folder / secrets.token_hex(6),
            tensors=tensors,
            side_files=side_files,
            joins={key: join for key, join in found.made.joins.items() if names.issuperset(join.names)},
            notes={SHAPES_FILE: shapes(model)},
            stop=self._stop,
        )

    def prune(self, keep: Collection[Path]) -> None:
        """Remove all folders but some; blocks. One that stays does no harm."""
        if self._folder.is_dir():
            for entry in self._folder.iterdir():
                if entry not in keep:
                    shutil.rmtree(entry, ignore_errors=True)


def _known(known: Sums, converted: Collection[str], recalled: Sums) -> dict[str, str]:
    return {name: recalled.get(name, "") if name in converted else value for name, value in known.items()}


def _folder(written: Written) -> Path:
    return Path(written.tensors[0].path).parent
