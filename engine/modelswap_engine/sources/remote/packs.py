"""Tensors made from what is here and packs of what differs, where that is less to fetch than the tensors themselves.

Packs lie beside the version that they make, named by the version that they are made from, so that a pod finds one for
what it holds. Nothing depends on them: what cannot be made is fetched as it is, and what is made counts by its hash
alone. Knows neither protocols nor what is in a pack (``modelswap_engine.delta``).
"""

import asyncio
import logging
import os
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.delta.layout import NAME_PREFIX, NAME_SUFFIX, pack_name
from modelswap_engine.delta.pack import Pack, ReadBase, Step, apply, open_pack
from modelswap_engine.delta.plan import Route, plan
from modelswap_engine.protocol.errors import Cancelled, ModelswapError, SourceUnreadable
from modelswap_engine.sources.port import ResolvedHere
from modelswap_engine.sources.remote.contents import read_range
from modelswap_engine.sources.remote.port import FileStat, Folder
from modelswap_engine.sources.remote.reserving import expected
from modelswap_engine.sources.threads import MountThreads
from modelswap_engine.store.content import ContentStore
from modelswap_engine.store.disk import writing
from modelswap_engine.store.incoming import Incoming

log = logging.getLogger("modelswap.sources")

AT_ONCE: Final = 8
"""Tensors that are made at the same time; most of it is waiting for ranges of packs."""
MOST_PACKS: Final = 16
"""How many packs of a folder are looked into."""
STEP_BYTES: Final = 64 << 10
"""What a tensor from a pack must save: it costs a request of its own, and reading the base."""
READ_SECONDS: Final = 120.0
BASE_SECONDS: Final = 30.0
"""So long a mount may take for a block of a base; after that it is not asked again for this fetch."""


async def make(
    missing: Sequence[TensorEntry],
    *,
    folder: Folder,
    store: ContentStore,
    digests: Collection[str],
    mounted: Sequence[ResolvedHere] = (),
) -> int:
    """Make what tensors can be made from packs of a folder; return how many bytes were read for it.

    Args:
        missing: tensors that the store does not have, with their hashes.
        folder: of the version.
        store: what is held, and where tensors go.
        digests: of versions that the store may have.
        mounted: versions whose bytes lie here without it.
    """
    known = {*digests, *(version.manifest.digest for version in mounted)}
    if not missing or not known:
        return 0
    lying = {
        entry.sha256: _Lying(version, version.range_of(entry.name))
        for version in mounted
        for entry in version.manifest.tensors
    }
    run = _Run(folder, store, lying)
    try:
        routes = await run.routes(missing, [pack_name(digest) for digest in sorted(known)])
        await run.all({sha256: route for sha256, route in routes.items() if route.links}, missing)
    except Cancelled:
        raise
    except ModelswapError as error:  # a right to look, or the room: the tensors themselves may be had all the same
        log.warning("%s: its packs are not used: %s", folder.uri, error.message)
    finally:
        run.end()
    return run.read_bytes


@dataclass(frozen=True)
class _Lying:
    """A tensor in a mounted folder."""

    version: ResolvedHere
    where: TensorRange


@dataclass(frozen=True)
class _Ranges:
    """A pack as threads read it; the loop fetches what they wait for."""

    run: "_Run"
    name: str
    stat: FileStat

    @property
    def size(self) -> int:
        return self.stat.size

    def read_into(self, offset: int, view: memoryview) -> None:
        view[:] = self.run.read(self.name, offset, offset + len(view), self.stat)


@dataclass
class _Run:
    folder: Folder
    store: ContentStore
    lying: Mapping[str, _Lying]
    read_bytes: int = 0
    _packs: dict[str, Pack] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _late: set[str] = field(default_factory=set)
    _threads: MountThreads = field(default_factory=lambda: MountThreads("packs", at_once=AT_ONCE))
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def routes(self, missing: Sequence[TensorEntry], names: Sequence[str]) -> Mapping[str, Route[str]]:
        """Look for packs, and return the cheapest way to each tensor."""
        there = await self.folder.files(names)
        named = [name for name in names if name in there]
        # Of what is not held, but may be on the way from there: chains of packs lie in one folder.
        others = [
            name for name in there if name not in names and name.startswith(NAME_PREFIX) and name.endswith(NAME_SUFFIX)
        ]
        for name in [*named, *(sorted(others) if named else [])][:MOST_PACKS]:
            await self._open(name, there[name])
        packs = {name: pack.header for name, pack in self._packs.items()}
        bases = {entry.base for header in packs.values() for entry in header.tensors if entry.base}
        held = (bases - self.store.missing(bases)) | (bases & self.lying.keys())
        return plan(missing, held=held, packs=packs, step_cost=STEP_BYTES)

    async def _open(self, name: str, stat: FileStat) -> None:
        try:
            self._packs[name] = await self._threads.run(open_pack, _Ranges(self, name, stat))
        except ModelswapError as error:
            log.warning("%s: %s is of no use: %s", self.folder.uri, name, error.message)

    async def all(self, routes: Mapping[str, Route[str]], missing: Sequence[TensorEntry]) -> None:
        """Make each tensor that has a route; what fails is left to whoever fetches tensors."""
        wanted = [entry for entry in missing if entry.sha256 in routes]
        if not wanted:
            return
        holder = f"packs:{id(self)}"
        bases = {route.links[0].entry.base for route in routes.values()} - {""}
        await asyncio.to_thread(self.store.hold, holder, bases)
        try:
            async with expected(self.store, [(entry.sha256, entry.nbytes) for entry in wanted]) as coming:
                try:
                    await asyncio.gather(*(self._made(item, routes[item.sha256]) for item in coming))
                finally:
                    self._stop.set()
        finally:
            await asyncio.shield(asyncio.to_thread(self.store.let_go, holder))

    async def _made(self, incoming: Incoming, route: Route[str]) -> None:
        steps = [Step(self._packs[link.pack], link.entry) for link in route.links]
        base = steps[0].entry.base
        try:
            await self._threads.run(self._apply, steps, self._base(base) if base else None, incoming)
        except Cancelled:
            raise
        except (ModelswapError, OSError) as error:
            log.warning("%s: tensor %s is fetched whole: %s", self.folder.uri, steps[-1].entry.name, error)

    def _base(self, sha256: str) -> ReadBase:
        """Return what reads a tensor that is here."""
        lies = self.lying.get(sha256) if self.store.missing([sha256]) else None
        return partial(self._read_mounted, lies) if lies is not None else partial(_read_blob, self.store, sha256)

    def _apply(self, steps: Sequence[Step], base: ReadBase | None, incoming: Incoming) -> None:
        at = 0

        def write(piece: memoryview) -> None:
            nonlocal at
            if self._stop.is_set():
                raise Cancelled("making tensors from packs was cancelled")
            with writing(incoming.path.parent):
                incoming.write(at, piece)
            at += len(piece)

        apply(steps, base=base, write=write)
        self.store.accept(incoming)

    def read(self, name: str, start: int, stop: int, stat: FileStat) -> bytes:
        """Fetch a range for a thread."""
        work = read_range(self.folder, name, start, stop, stat=stat)
        data = self._waited(work, READ_SECONDS, what=f"{name}: bytes {start} to {stop}")
        self.read_bytes += len(data)
        return data

    def _read_mounted(self, lies: _Lying, begin: int, view: memoryview) -> None:
        """Have the mount's own threads read, since one that hangs may never come back."""
        path, uri = lies.where.path, lies.version.uri
        if uri in self._late:
            raise SourceUnreadable(f"{path}: its mount did not answer", advice="the tensor is fetched whole")
        try:
            data = self._waited(lies.version.read(lies.where, begin, len(view)), BASE_SECONDS, what=path)
        except SourceUnreadable:
            self._late.add(uri)
            raise
        _fill(view, data, path)

    def _waited(self, work: Coroutine[Any, Any, bytes], seconds: float, *, what: str) -> bytes:
        future: Future[bytes] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise SourceUnreadable(f"{what} did not come within {seconds:g} s") from None

    def end(self) -> None:
        """Let the threads end; none waits for what nobody fetches any more."""
        self._stop.set()


def _read_blob(store: ContentStore, sha256: str, begin: int, view: memoryview) -> None:
    stream = store.open_blob(sha256)
    if stream is None:
        raise SourceUnreadable(f"{store.path(sha256)}: not there any more", advice="the tensor is fetched whole")
    with stream:
        _fill(view, os.pread(stream.fileno(), len(view), begin), store.path(sha256))


def _fill(view: memoryview, data: bytes, path: str | Path) -> None:
    if len(data) != len(view):
        raise SourceUnreadable(f"{path}: it ended early", advice="the tensor is fetched whole")
    view[:] = data
