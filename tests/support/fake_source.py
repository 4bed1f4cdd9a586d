"""Checkpoints in memory behind the source port, for unit tests of the swap only."""

import asyncio
import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.canonical import side_file
from modelswap_engine.checkpoint.layout import Evidence
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry, encode, make_manifest
from modelswap_engine.protocol.errors import ModelswapError, SourceChanged, SourceNotFound
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.sources.port import Brought, Travelled

CONFIG = b'{"architectures": ["Tiny"], "hidden_size": 4, "eos_token_id": 2}'


class FakeCheckpoint:
    """Tensors (U8, one dimension) and side files."""

    def __init__(
        self, tensors: dict[str, bytes], *, side: dict[str, bytes] | None = None, architecture: str = "Tiny"
    ) -> None:
        self.tensors = tensors
        self.side = {"config.json": CONFIG} | (side or {})
        self.architecture = architecture

    def manifest(self) -> Manifest:
        entries = {
            name: TensorEntry(
                name=name,
                dtype="U8",
                shape=(len(data),),
                nbytes=len(data),
                file="model.safetensors",
                offset=0,
                sha256=sha256(data),
            )
            for name, data in self.tensors.items()
        }
        side = {name: side_file(name, data) for name, data in self.side.items()}
        return make_manifest(entries, side, architecture=self.architecture)

    @property
    def digest(self) -> str:
        return self.manifest().digest


class FakeResolved:
    def __init__(self, place: "FakeSources", uri: str, checkpoint: FakeCheckpoint) -> None:
        self._place = place
        self._checkpoint = checkpoint
        self.uri = uri
        self.manifest = checkpoint.manifest()
        self.header_bytes = 100
        self.credentials = ""
        signature = place.signatures.get(uri)
        self.evidence = Evidence(encode(self.manifest), signature) if signature is not None else None

    async def obtain(self, names: Iterable[str], *, travelled: Travelled | None = None) -> Brought | None:
        if self.uri in self._place.unfetchable:
            raise self._place.unfetchable[self.uri]
        if self.uri not in self._place.elsewhere:
            return None
        wanted = sorted(names)
        self._place.obtained.append(wanted)
        return Brought(source=sum(self.manifest.by_name[name].nbytes for name in wanted))

    def range_of(self, name: str) -> TensorRange:
        entry = self.manifest.by_name[name]
        return TensorRange(
            name=name,
            dtype=entry.dtype,
            shape=entry.shape,
            path=self.uri,
            offset=0,
            nbytes=entry.nbytes,
            sha256=entry.sha256,
        )

    async def copy_side_files(self, destination: Path) -> None:
        destination.mkdir(exist_ok=True)
        for name, data in self._checkpoint.side.items():
            (destination / name).write_bytes(data)

    async def unchanged(self, *, suspected: bool = False) -> None:
        if self.uri in self._place.touched:
            raise SourceChanged(f"{self.uri} was overwritten while it was read")

    async def moved(self) -> SourceLook:
        if self.uri in self._place.hanging:
            await asyncio.Event().wait()
        if self.uri in self._place.errors:
            raise self._place.errors[self.uri]
        return SourceLook(found=self._place.moved.get(self.uri, ""))


class FakeSources:
    """All checkpoints by URI.

    Attributes:
        errors: raised instead of resolving.
        hanging: these never answer.
        touched: these say that they changed since they were resolved.
        elsewhere: bytes of these travel; ``obtained`` is the names of each time that they did.
        unfetchable: raised when their bytes are wanted.
        retained: the versions that were last said to be in use.
        signatures: what lies beside their manifests.
        moved: what these hold instead of what was resolved.
    """

    def __init__(self) -> None:
        self.checkpoints: dict[str, FakeCheckpoint] = {}
        self.errors: dict[str, ModelswapError] = {}
        self.hanging: set[str] = set()
        self.touched: set[str] = set()
        self.resolved: list[str] = []
        self.elsewhere: set[str] = set()
        self.obtained: list[list[str]] = []
        self.unfetchable: dict[str, ModelswapError] = {}
        self.retained: set[str] = set()
        self.signatures: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}

    async def retain(self, digests: Collection[str]) -> None:
        self.retained = set(digests)

    async def resolve(self, uri: str, *, digest: str = "", credentials: str = "") -> FakeResolved:
        self.resolved.append(uri)
        if uri in self.hanging:
            await asyncio.Event().wait()
        if uri in self.errors:
            raise self.errors[uri]
        if uri not in self.checkpoints:
            raise SourceNotFound(f"{uri}: nothing is there")
        return FakeResolved(self, uri, self.checkpoints[uri])

    def read(self, tensor: TensorRange) -> bytes:
        """What an engine reads: the bytes as they are now."""
        return self.checkpoints[tensor.path].tensors[tensor.name]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
