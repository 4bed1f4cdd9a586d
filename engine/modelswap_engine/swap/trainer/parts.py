"""What an open weight update is filled with: tensors of a checkpoint, a body, shared memory, a process group.

A part is checked against the running model before its bytes move, and again as the engine reports it. A part that fails
leaves the update as it was.
"""

import fnmatch
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.transfer import ReceiveBroadcast, ReceiveFiles, TensorSpec
from modelswap_engine.checkpoint.layout import Reader
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.checkpoint.rules import check_tensor_name, expected_nbytes, is_hash
from modelswap_engine.protocol.engine_state import UpdateState
from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.updates import BroadcastPart, DiskPart, SharedPart, SharedTensor
from modelswap_engine.swap import sourcing
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.trainer.exchange import Exchange
from modelswap_engine.swap.trainer.export import sent_names
from modelswap_engine.swap.trainer.open_update import OpenUpdate, check_fit
from modelswap_engine.swap.trainer.updates import Updates

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies on Linux


class Parts:
    """Fills the open update.

    Args:
        core: the shared state.
        updates: has the update.
        exchange: has the engine take tensors in.
        shared_memory: the folder of shared memory segments.
    """

    def __init__(
        self, core: Core, *, updates: Updates, exchange: Exchange, shared_memory: Path = SHARED_MEMORY
    ) -> None:
        self._core = core
        self._updates = updates
        self._exchange = exchange
        self._shared_memory = shared_memory

    async def disk(self, update_id: str, part: DiskPart) -> UpdateState:
        """Add tensors of a checkpoint at a source by name; without names the whole version.

        Raises:
            BadRequest: no tensor matches.
            IncompatibleModel: a tensor does not fit the running model.
            ModelswapError: of the source, or of the update (:meth:`Updates.turn`).
        """
        core = self._core
        async with self._updates.turn(update_id, part.owner) as update:
            resolved = await sourcing.resolve(core, VersionRef(uri=part.uri), unless=update.gone)
            if not part.names:
                label = part.uri.rstrip("/").rpartition("/")[2]
                work = core.store.materialise(resolved, asked=VersionRef(version=label))
                version = await core.bounded(
                    "copying side files", work, core.settings.stage_seconds, unless=update.gone
                )
                update.take_whole(version, source="disk")
            else:
                entries = [e for e in resolved.manifest.tensors if _matches(e.name, part.names)]
                if not entries:
                    raise BadRequest(
                        f"no tensor of {part.uri[:200]} matches {', '.join(part.names)[:200]}",
                        advice="use globs of checkpoint tensor names, for example 'model.layers.0.*'",
                    )
                for entry in entries:
                    check_fit(update.manifest, entry.name, entry.dtype, entry.shape)
                await sourcing.obtain(core, resolved, [entry.name for entry in entries], unless=update.gone)
                ranges = [resolved.range_of(entry.name) for entry in entries]
                update.take_files(ranges, part=resolved, source="disk")
            return update.state(core.clock.monotonic())

    async def tensors(self, update_id: str, file: Path, *, owner: str, loader: str = "") -> UpdateState:
        """Add the tensors of a safetensors file that was sent; it may go after the answer.

        Raises:
            InvalidCheckpoint, UnsupportedFormat: it is no safetensors file.
            IncompatibleModel: a tensor does not fit the running model.
            ModelswapError: of the update (:meth:`Updates.turn`) or of the engine.
        """
        async with self._updates.turn(update_id, owner) as update:
            ranges = await self._core.offload(partial(_ranges_in, file))
            return await self._receive_files(update, ranges, loader=loader, source="tensor")

    async def shared(self, update_id: str, part: SharedPart) -> UpdateState:
        """Add tensors that lie in a segment of shared memory of this host.

        Raises:
            BadRequest: not the name of a segment.
            InvalidCheckpoint: its header says impossible things.
            IncompatibleModel: a tensor does not fit the running model.
            SourceUnreadable: there is no such segment.
            ModelswapError: of the update (:meth:`Updates.turn`) or of the engine.
        """
        async with self._updates.turn(update_id, part.owner) as update:
            path = self._shared_memory / part.segment
            if part.segment in {"", ".", ".."} or "/" in part.segment or "\0" in part.segment:
                raise BadRequest(
                    f"{part.segment[:200]!r} is not the name of a shared memory segment",
                    advice="send the name as shm_open takes it, without a slash",
                )
            ranges = tuple(_range_in_segment(path, tensor) for tensor in part.tensors)
            return await self._receive_files(update, ranges, loader=part.loader, source="ipc")

    async def broadcast(self, update_id: str, part: BroadcastPart) -> UpdateState:
        """Add tensors that a member of a process group broadcasts while this call waits.

        Raises:
            UnknownGroup: the engine is in no such group.
            GroupFailed: the sender is gone, sends something else, or took too long; the group is left.
            IncompatibleModel: an announced tensor does not fit the running model.
            ModelswapError: of the update (:meth:`Updates.turn`) or of the engine.
        """
        async with self._updates.turn(update_id, part.owner) as update:
            specs = tuple(TensorSpec(name=t.name, dtype=t.dtype, shape=tuple(t.shape)) for t in part.tensors)
            order = ReceiveBroadcast(
                operation_id=update.id,
                group=part.group,
                tensors=specs or self._all(update),
                root=part.root,
                flattened=part.flattened,
                loader=part.loader,
                seconds=part.seconds,
            )
            return await self._receive(update, order, seconds=part.seconds, source="distributed")

    def _all(self, update: OpenUpdate) -> tuple[TensorSpec, ...]:
        entries = update.manifest.by_name
        names = sent_names(update.manifest, self._core.engine.groups())
        return tuple(TensorSpec(name=name, dtype=entries[name].dtype, shape=entries[name].shape) for name in names)

    async def _receive_files(
        self, update: OpenUpdate, ranges: tuple[TensorRange, ...], *, loader: str, source: str
    ) -> UpdateState:
        order = ReceiveFiles(operation_id=update.id, tensors=ranges, loader=loader)
        return await self._receive(update, order, seconds=self._core.settings.stage_seconds, source=source)

    async def _receive(
        self, update: OpenUpdate, order: ReceiveFiles | ReceiveBroadcast, *, seconds: float, source: str
    ) -> UpdateState:
        if not order.loader:
            for item in order.tensors:
                check_fit(update.manifest, item.name, item.dtype, item.shape)
        sizes = (expected_nbytes(t.dtype, t.shape, file=source, tensor=t.name) for t in order.tensors)
        await self._exchange.make_room(update, sum(sizes))
        received = await self._exchange.receive(order, seconds=seconds, unless=update.gone)
        for tensor in received:
            check_fit(update.manifest, tensor.name, tensor.dtype, tensor.shape)
        update.take_received(received, source=source)
        return update.state(self._core.clock.monotonic())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _ranges_in(file: Path) -> tuple[TensorRange, ...]:
    entries = Reader(file.parent, roots=[file.parent]).header(file.name)
    return tuple(_range(entry, file) for entry in entries or ())


def _range(entry: TensorEntry, file: Path) -> TensorRange:
    return TensorRange(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        path=str(file),
        offset=entry.offset,
        nbytes=entry.nbytes,
        sha256="",
    )


def _range_in_segment(path: Path, tensor: SharedTensor) -> TensorRange:
    check_tensor_name(tensor.name, file=path.name)
    shape = tuple(tensor.shape)
    if tensor.sha256 and not is_hash(tensor.sha256):
        raise BadRequest(
            f"tensor {tensor.name!r}: its sha256 is not 64 hex digits", advice="leave it out, or correct it"
        )
    return TensorRange(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=shape,
        path=str(path),
        offset=tensor.offset,
        nbytes=expected_nbytes(tensor.dtype, shape, file=path.name, tensor=tensor.name),
        sha256=tensor.sha256,
    )
