"""Object stores in memory that versions are published to and read from, by the same code as real ones."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import obstore
from obstore.store import MemoryStore

from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.protocol.errors import PublishFailed
from modelswap_engine.publishing.base import allowed_beside, read_base
from modelswap_engine.publishing.folder import read_folder
from modelswap_engine.publishing.objects import ObjectPlace
from modelswap_engine.publishing.packing import Packing
from modelswap_engine.publishing.port import File, Version
from modelswap_engine.publishing.publisher import Published, Sign, publish
from modelswap_engine.publishing.sides import Elsewhere
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.objects import ObjectFolder
from modelswap_engine.sources.remote.fetch import Fetcher, FetchSettings
from modelswap_engine.sources.remote.folders import Folders
from modelswap_engine.sources.remote.port import FileStat
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.source import RemoteSource
from modelswap_engine.store.content import ContentStore

BUCKET = "s3://bucket"


class Stores:
    """One store in memory for each folder; an opener of them all.

    Attributes:
        put: files in the order in which they were put, as (URI, name).
        failing: names of files whose upload breaks off in the middle.
        before: done by somebody else right before a publish looks at its files again ("show"), and before it creates
            the manifest ("create").
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._stores: dict[str, MemoryStore] = {}
        self._pods = 0
        self.put: list[tuple[str, str]] = []
        self.travelled = 0
        self.failing: set[str] = set()
        self.before: dict[str, Callable[[], object]] = {}

    def store(self, uri: str) -> MemoryStore:
        return self._stores.setdefault(uri, MemoryStore())

    async def open(self, uri: str, *, credentials: str) -> ObjectFolder:
        return ObjectFolder(uri, self.store(uri))

    def names(self, uri: str) -> set[str]:
        return {str(meta["path"]) for meta in obstore.list(self.store(uri)).collect()}

    async def publish(
        self,
        version: Version | Path,
        uri: str,
        *,
        base: str = "",
        allow: tuple[str, ...] = (),
        pack: str = "",
        sign: Sign | None = None,
    ) -> Published:
        """Publish a version, or a folder; ``pack`` is "", "wanted" or "required"."""
        made = read_folder(version) if isinstance(version, Path) else version
        place = _Place(self, uri)
        if not (base := base.rstrip("/")):
            return await publish(made, place, sign=sign)
        async with Folders(self, base, credentials="", allowed=allowed_beside([uri, base], allow)) as at:
            found, contents = await read_base(at, base)
            side = Elsewhere(base, found.manifest, contents, at)
            packing = Packing(base=side, required=pack == "required") if pack else None
            return await publish(made, place, base=found, packing=packing, sign=sign)

    async def fetched(
        self, uri: str, *, allow: tuple[str, ...] = (BUCKET,), after: str = ""
    ) -> tuple[str, Mapping[str, bytes]]:
        """Read a version as a new pod does, or one that has another one; return its digest and all bytes of it.

        ``travelled`` says how many bytes of tensors came for it.
        """
        self._pods += 1
        pod = self._home / f"pod-{self._pods}"
        store = ContentStore(pod / "store", limit_bytes=0)
        store.open()
        source = RemoteSource(
            self,
            allowed=Allowed(allow),
            store=store,
            records=Records(pod / "sources"),
            fetcher=Fetcher(store, settings=FetchSettings(attempts=1)),
        )
        if after:
            before = await source.resolve(after)
            await before.obtain(before.manifest.by_name)
        resolved = await source.resolve(uri)
        self.travelled = (await resolved.obtain(resolved.manifest.by_name)).source
        await resolved.copy_side_files(pod / "side")
        found = {name: store.path(entry.sha256).read_bytes() for name, entry in resolved.manifest.by_name.items()}
        for name, entry in resolved.manifest.by_name.items():
            assert hashlib.sha256(found[name]).hexdigest() == entry.sha256
        sides = {side.name: (pod / "side" / side.name).read_bytes() for side in resolved.manifest.side_files}
        return resolved.manifest.digest, found | sides


class _Place(ObjectPlace):
    """Notes what is put, and breaks off as a test says."""

    def __init__(self, stores: Stores, uri: str) -> None:
        super().__init__(ObjectFolder(uri, stores.store(uri)))
        self._stores = stores

    async def put(self, upload: File, data: AsyncIterator[bytes]) -> FileStat:
        if upload.name in self._stores.failing:
            await anext(data)
            raise PublishFailed(f"{upload.name}: it broke off")
        self._stores.put.append((self.uri, upload.name))
        return await super().put(upload, data)

    async def show(self, manifest: bytes, *, sent: Mapping[str, FileStat]) -> None:
        if MANIFEST_FILE in self._stores.failing:
            raise PublishFailed("the manifest: it broke off")
        self._stores.before.get("show", lambda: None)()
        await super().show(manifest, sent=sent)
        self._stores.put.append((self.uri, MANIFEST_FILE))

    async def _create(self, manifest: bytes, *, free: bool) -> None:
        self._stores.before.get("create", lambda: None)()
        await super()._create(manifest, free=free)
