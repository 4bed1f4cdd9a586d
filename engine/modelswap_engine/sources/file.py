"""``file:///…`` and ``pvc://CLAIM/…``: checkpoints on mounted volumes, under allowed roots only.

All links are resolved before anything is compared with the roots, and nothing outside them is opened. The manifest is
the shipped one, held against the headers, or is computed (and kept in the cache). A shipped one may name other mounted
folders for what is not new in the version. Every read happens in a thread, and each mount has its own.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from modelswap_engine.checkpoint import build
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.files import contained
from modelswap_engine.checkpoint.layout import Contents, read_contents
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, TensorEntry
from modelswap_engine.checkpoint.rules import invisible, shown
from modelswap_engine.protocol.errors import (
    InvalidCheckpoint,
    ManifestMismatch,
    SourceNotAllowed,
    SourceNotFound,
    SourceUnreadable,
    UnsupportedFormat,
)
from modelswap_engine.sources.adapter import LocalAdapter, open_adapter
from modelswap_engine.sources.cache import ManifestCache
from modelswap_engine.sources.local import LocalCheckpoint
from modelswap_engine.sources.threads import MountThreads

T = TypeVar("T")
MOUNTED: Final = frozenset({"file", "pvc"})
REMEMBERED: Final = 4
"""So many versions that were resolved last are remembered, besides those in use."""
ROOT_SECONDS: Final = 5.0
"""So long a root is waited for that a link may lead to."""
NO_ROOT: Final = Path()
"""Whose threads read what lies under no root as it is written."""
NO_CLAIMS: Final[Mapping[str, Path]] = MappingProxyType({})


class FileSource:
    """Checkpoint folders below some roots.

    Args:
        roots: folders that checkpoints, and the links in them, may lie in.
        claims: where persistent volume claims are mounted, by name; each is a root.
        cache: folder for computed manifests; None keeps none.
        progress: told (bytes done, bytes in all) while a manifest is computed, from another thread.
        clock_ns: wall clock in nanoseconds.
    """

    def __init__(
        self,
        *,
        roots: Sequence[Path],
        cache: Path | None,
        claims: Mapping[str, Path] = NO_CLAIMS,
        progress: Progress | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._roots = (*roots, *claims.values())
        self._claims = dict(claims)
        self._cache = ManifestCache(cache) if cache is not None else None
        self._progress = progress
        self._clock_ns = clock_ns
        self._used: frozenset[str] = frozenset()
        self._found: dict[str, LocalCheckpoint] = {}
        self._threads = {root: MountThreads(f"read {root}") for root in (NO_ROOT, *self._roots)}
        self._real: dict[Path, Path] = {}

    async def resolve(self, uri: str, *, digest: str = "", credentials: str = "") -> LocalCheckpoint:
        """Find, read and validate the checkpoint at a URI; see :class:`sources.port.Source`."""
        stop = threading.Event()
        try:
            found = await self._run(uri, partial(self._resolve, uri, stop))
        except asyncio.CancelledError:
            stop.set()  # the thread ends at its next chunk
            raise
        self._found.pop(found.manifest.digest, None)
        self._found[found.manifest.digest] = found
        for digest in [digest for digest in self._found if digest not in self._used][:-REMEMBERED]:
            del self._found[digest]
        return found

    def found(self) -> tuple[LocalCheckpoint, ...]:
        """Return the versions in use, and those that were resolved last."""
        return tuple(self._found.values())

    def _resolve(self, uri: str, stop: threading.Event) -> LocalCheckpoint:
        read_at_ns = self._clock_ns()
        contents = self._read(uri)
        again, threads = partial(self._read, uri), self._threads_of(uri)
        found = partial(LocalCheckpoint, uri=uri, contents=contents, again=again, threads=threads)
        if contents.shipped is not None:
            manifest = manifests.decode(contents.shipped)
            build.check_shipped(manifest, contents, file=MANIFEST_FILE)
            return found(manifest=manifest)
        kept = self._cached(contents)
        if kept is not None:
            return found(manifest=kept)
        manifest = build.hash_contents(contents, roots=self._resolved_roots(uri), progress=self._progress, stop=stop)
        if self._cache is not None:
            self._cache.put(contents.directory, contents.stamps, manifest, read_at_ns=read_at_ns)
        return found(manifest=manifest)

    def _read(self, uri: str) -> Contents:
        roots = self._resolved_roots(uri)
        return read_contents(self._directory(uri, roots), roots=roots, shipped=True, find=partial(self._find, uri))

    async def _run(self, uri: str, call: Callable[[], T]) -> T:
        """Call in the threads of a URI's mount; once more where a link may lead to a root that is itself a link."""
        threads, known = self._threads_of(uri), len(self._real)
        try:
            return await threads.run(call)
        except (SourceNotAllowed, InvalidCheckpoint):
            await asyncio.gather(*(self._ask(root) for root in self._roots if root not in self._real))
            if len(self._real) == known:
                raise
        return await threads.run(call)

    async def _ask(self, root: Path) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._threads[root].run(self._look, root), ROOT_SECONDS)

    def _look(self, root: Path) -> None:
        with contextlib.suppress(OSError):
            if root not in self._real and root != NO_ROOT and root.exists():
                self._real[root] = root.resolve()

    def _resolved_roots(self, uri: str) -> tuple[Path, ...]:
        """Return where the roots are. Only that of the URI is asked: the server of another may be gone."""
        self._look(self._root_of(uri))
        return tuple(self._real.get(root, root) for root in self._roots)

    def _root_of(self, uri: str) -> Path:
        """Return the root that a path is on as it is written; a link may lead to another."""
        path = self._path(uri)
        roots = [root for root in self._roots if path.is_relative_to(root)]
        return max(roots, key=lambda root: len(root.parts), default=NO_ROOT)

    def _threads_of(self, uri: str) -> MountThreads:
        return self._threads[self._root_of(uri)]

    def _find(self, uri: str, entry: TensorEntry) -> Path:
        """Return the folder of a tensor that the manifest of a version names, under the same roots as the version."""
        told = f"{shown(uri, 200)}: tensor {entry.name!r} lies in {shown(entry.place, 200)}"
        if entry.place.partition(":")[0].lower() not in MOUNTED:
            raise UnsupportedFormat(
                f"{told}, and a version in a mounted folder can have tensors in mounted folders only",
                advice="name the version where it was published, or publish it whole (without --base)",
                details={"tensor": entry.name},
            )
        try:
            return self._directory(entry.place, self._resolved_roots(entry.place))
        except (SourceNotAllowed, SourceNotFound) as error:
            raise type(error)(
                f"{told}: {error.message}", advice=error.advice, details={**error.details, "tensor": entry.name}
            ) from None

    async def open_adapter(self, uri: str, *, credentials: str = "") -> LocalAdapter:
        """Find the LoRA adapter at a URI; see :class:`sources.port.Source`."""
        return await self._run(uri, partial(self._open_adapter, uri))

    async def retain(self, digests: Collection[str]) -> None:
        """Forget the other versions; of them it keeps nothing but manifests."""
        self._used = frozenset(digests)
        self._found = {digest: found for digest, found in self._found.items() if digest in self._used}

    def _open_adapter(self, uri: str) -> LocalAdapter:
        roots = self._resolved_roots(uri)
        return open_adapter(self._directory(uri, roots), roots=roots, threads=self._threads_of(uri))

    def _cached(self, contents: Contents) -> Manifest | None:
        kept = self._cache.get(contents.directory, contents.stamps) if self._cache is not None else None
        if kept is None:
            return None
        try:
            build.check_tensors(kept, contents, file=MANIFEST_FILE)
        except ManifestMismatch:  # a damaged entry: the headers are the truth
            return None
        return kept

    def _path(self, uri: str) -> Path:
        scheme, _, rest = uri.partition("://")
        if scheme.lower() != "pvc":
            return path_of(uri)
        claim, _, path = rest.partition("/")
        if claim not in self._claims:
            raise SourceNotAllowed(
                f"the claim {shown(claim, 100)!r} is not mounted in this pod",
                advice=f"mounted: {', '.join(sorted(self._claims)) or 'none'}; a pod cannot get new mounts: name it "
                "in the engine chart (sources.claims) and roll the pods",
                details={"claim": claim[:100]},
            )
        return self._claims[claim] / path_of(f"file:///{path}").relative_to("/")

    def _directory(self, uri: str, roots: Sequence[Path]) -> Path:
        path = self._path(uri)
        try:
            directory = path.resolve()
        except (RuntimeError, OSError):
            raise SourceNotFound(f"{shown(uri, 200)}: links that lead nowhere", advice="check the path") from None
        if not contained(directory, roots):
            # Before asking whether it exists: what lies outside the roots is not told.
            raise SourceNotAllowed(
                f"{shown(uri, 200)}: outside the allowed roots",
                advice=f"put it under {', '.join(map(str, self._roots)) or 'a root'}, or add one with --allow-root",
            )
        try:
            found = directory.exists()
        except OSError as error:
            raise SourceUnreadable(
                f"{shown(uri, 200)}: {error.strerror}", advice="check the permissions of the volume"
            ) from None
        if not found:
            raise SourceNotFound(f"{shown(uri, 200)}: nothing is there", advice="check the path and the mounted volume")
        return directory


def path_of(uri: str) -> Path:
    """Return the path that a ``file:`` URI means; links are not followed.

    Raises:
        SourceNotAllowed: not such a URI.
    """
    try:
        parts = urlsplit(uri)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        _not_a_file_uri(uri)
    if parts.netloc not in {"", "localhost"} or parts.query or parts.fragment:
        _not_a_file_uri(uri)
    # Both texts: urlsplit drops newlines and tabs, and unquote can make new ones.
    if not path.startswith("/") or invisible(uri) or invisible(path):
        _not_a_file_uri(uri)
    return Path(path)


def _not_a_file_uri(uri: str) -> NoReturn:
    raise SourceNotAllowed(f"{shown(uri, 200)}: not of the form file:///absolute/path", advice="write file:///…")
