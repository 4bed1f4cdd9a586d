"""Weights that leave the engine: to a process group, to a folder, or a few numbers of them to a person.

What leaves is the live version, byte for byte as its manifest says, or nothing. None of it holds up a swap: one that
comes ends the export.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.transfer import JoinGroup, LeaveGroup, ReadTensor, SendBroadcast, WriteFile
from modelswap_engine.checkpoint import saving
from modelswap_engine.checkpoint.files import contained
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.protocol.errors import (
    BadRequest,
    Busy,
    Internal,
    ModelswapError,
    NotFound,
    NotReady,
    SourceNotAllowed,
    Unavailable,
    UnsupportedScheme,
)
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.transfers import (
    JoinGroupRequest,
    ReadRequest,
    ReadResult,
    SaveRequest,
    SaveResult,
    SendRequest,
    SendResult,
)
from modelswap_engine.sources.file import path_of
from modelswap_engine.swap import sourcing
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.records import Served
from modelswap_engine.swap.trainer.exchange import Exchange
from modelswap_engine.swap.trainer.peers import Peers
from modelswap_engine.swap.versions import Version


class Export:
    """Gives the live weights out.

    Args:
        core: the shared state.
        exchange: has the engine do it.
        peers: whom the engine may meet in a group.
        roots: folders below which checkpoints may be written.
    """

    def __init__(self, core: Core, *, exchange: Exchange, peers: Peers, roots: Sequence[Path]) -> None:
        self._core = core
        self._exchange = exchange
        self._peers = peers
        self._roots = tuple(roots)

    # Groups.

    async def join(self, request: JoinGroupRequest) -> None:
        """Meet the other members of a group.

        Raises:
            PeerNotAllowed: not with that address.
            BadRequest: the group has no place for every rank that joins.
            Busy: there is a group with this name.
            GroupFailed: the others did not come.
        """
        joining = 1 if request.sends else self._core.engine.processes
        if request.rank + joining > request.size:
            raise BadRequest(
                f"group {request.group[:200]!r} has {request.size} members, this engine takes {joining} places from "
                f"{request.rank} on",
                advice="count every rank of this engine (get_world_size), or join with sends: true to send only",
            )
        address: str = await self._core.offload(self._peers.admit, request.address)
        order = JoinGroup(
            group=request.group,
            address=address,
            port=request.port,
            rank=request.rank,
            size=request.size,
            backend=request.backend.value,
            sends=request.sends,
            seconds=request.seconds,
        )
        await self._exchange.carry_out(order, seconds=request.seconds)

    async def leave(self, group: str) -> None:
        """Leave a group.

        Raises:
            UnknownGroup: the engine is in no such group.
        """
        await self._exchange.carry_out(LeaveGroup(group=group), seconds=self._core.engine.patience.call)

    async def send(self, group: str, request: SendRequest) -> SendResult:
        """Broadcast the live tensors to a group.

        Raises:
            UnknownGroup: the engine is in no such group.
            GroupFailed: a member is gone, or took too long.
            Busy: a swap came first.
        """
        async with self._reading() as (version, interrupted):
            names = sent_names(version.manifest, self._core.engine.groups())
            order = SendBroadcast(group=group, names=names, seconds=request.seconds)
            await self._exchange.carry_out(order, seconds=request.seconds, unless=interrupted)
            size = sum(version.manifest.by_name[name].nbytes for name in names)
            return SendResult(digest=version.digest, tensors=len(names), bytes=size)

    # One tensor.

    async def read(self, request: ReadRequest) -> ReadResult:
        """Read some numbers of a live tensor.

        Raises:
            NotFound: no such tensor.
            BadRequest: too many numbers.
        """
        live = self._live()
        if request.name not in live.manifest.by_name:
            raise NotFound(f"no tensor {request.name[:200]!r}", advice="use a name of the manifest")
        order = ReadTensor(name=request.name, rows=request.rows)
        replies = await self._exchange.carry_out(order, seconds=self._core.engine.patience.call)
        reading = next((reply.reading for reply in replies if reply.reading is not None), None)
        if reading is None:
            raise Internal("no rank has read the tensor")
        return ReadResult(
            name=request.name, dtype=reading.dtype, shape=list(reading.shape), numbers=list(reading.numbers)
        )

    # A folder.

    async def save(self, request: SaveRequest) -> SaveResult:
        """Write the live version as a checkpoint folder that did not exist; it appears when it is whole.

        Raises:
            SourceNotAllowed: outside the export roots.
            Busy: something is there already, or a swap came first.
            ManifestMismatch: the live bytes are not those of the version; nothing is written.
            Unavailable: the disk does not take it.
        """
        core = self._core
        try:
            destination: Path = await core.offload(self._destination, request.uri)
        except (OSError, RuntimeError) as error:  # a path that no file system takes, a circle of links
            raise SourceNotAllowed(f"{request.uri[:200]!r}: {error}", advice="name a folder that can be made") from None
        async with self._reading() as (version, interrupted):
            parts = saving.shards(version.manifest, shard_bytes=request.shard_bytes)
            unread = [entry.name for entry in version.manifest.tensors if entry.name not in self._read()]
            await sourcing.obtain(core, version.resolved, unread, unless=interrupted)
            draft = await self._draft(destination)
            try:
                for part in parts:
                    tensors = tuple(self._range(version, entry.name) for entry in part.tensors)
                    order = WriteFile(path=str(draft / part.file), tensors=tensors)
                    await self._exchange.carry_out(order, seconds=core.settings.stage_seconds, unless=interrupted)
                finish = partial(
                    saving.complete,
                    draft,
                    destination,
                    manifest=version.manifest,
                    parts=parts,
                    side_files=version.directory,
                )
                await core.offload(finish)
            except OSError as error:
                raise _not_taken(destination, error) from None
            finally:
                await core.offload(partial(rmtree, draft, ignore_errors=True))
            lasting = await self._settle(version, request.uri)
        return SaveResult(
            uri=request.uri,
            digest=version.digest,
            files=[part.file for part in parts],
            bytes=version.manifest.total_bytes,
            lasting=lasting,
        )

    def _destination(self, uri: str) -> Path:
        if not uri.startswith("file:///"):
            raise UnsupportedScheme(
                f"{uri[:200]!r}: weights are saved to folders", advice="write file:///absolute/path"
            )
        path = path_of(uri)
        parent = path.parent.resolve()
        if not path.name or path.name in {".", ".."} or not contained(parent, [root.resolve() for root in self._roots]):
            raise SourceNotAllowed(
                f"{uri[:200]!r} is not below a folder that this engine may write to",
                advice=f"allowed: {', '.join(map(str, self._roots)) or 'none'}; add one with --export-root",
            )
        destination = parent / path.name
        if destination.exists() or destination.is_symlink():
            raise Busy(f"{uri[:200]!r} exists already", advice="save each version to a new folder")
        return destination

    async def _draft(self, destination: Path) -> Path:
        def make() -> Path:
            destination.parent.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))

        try:
            draft: Path = await self._core.offload(make)
        except OSError as error:
            raise _not_taken(destination, error) from None
        return draft

    def _read(self) -> frozenset[str]:
        """Names of the checkpoint's tensors that the engine has in its memory."""
        return frozenset(member for group in self._core.engine.groups() for member in group)

    def _range(self, version: Version, name: str) -> TensorRange:
        """What is read by the engine comes from its memory, the rest of the checkpoint from its files."""
        if name not in self._read():
            return version.resolved.range_of(name)
        entry = version.manifest.by_name[name]
        return TensorRange(
            name=name, dtype=entry.dtype, shape=entry.shape, path="", offset=0, nbytes=entry.nbytes, sha256=entry.sha256
        )

    async def _settle(self, version: Version, uri: str) -> bool:
        """From now on a version that was only in memory is loaded from where it was saved."""
        core = self._core
        if version.lasts:
            return True
        try:
            resolved = await sourcing.resolve(core, VersionRef(uri=uri))
        except ModelswapError:
            return False  # it may be written there, but not read
        if core.live is not version or resolved.manifest.digest != version.digest:
            return False
        ref = VersionRef(version=version.ref.version, uri=uri, digest=version.digest)
        core.live = Version(ref=ref, resolved=resolved, directory=version.directory)
        core.touch()
        await core.record_owed(Served(version=ref))
        return True

    # What all need.

    def _live(self) -> Version:
        live = self._core.live
        if live is None:
            raise NotReady("no version is live in this engine", advice="read the state for the reason")
        return live

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[tuple[Version, asyncio.Future[None]]]:
        core = self._core
        if core.operations.current is not None:
            raise Busy(f"operation {core.operations.current.id!r} is in progress", advice="try again when it has ended")
        core.preempt()  # an audit, which comes again by itself
        async with core.mutex:
            version = self._live()
            with core.preemptible() as interrupted:
                yield version, interrupted


def sent_names(manifest: Manifest, groups: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the tensors that engines exchange, in the order in which they do."""
    return tuple(sorted(name for group in groups for name in group if name in manifest.by_name))


def _not_taken(path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"{path}: {error.strerror or error}", advice="check that the folder is writable and has space")
