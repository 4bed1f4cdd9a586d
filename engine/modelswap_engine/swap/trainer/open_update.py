"""One open weight update as a value that grows: what arrived, from where, and until when it may stay open.

It decides which version the parts make; it moves no bytes and asks nobody.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.transfer import ReceivedTensor
from modelswap_engine.checkpoint.manifest import Manifest, TensorEntry
from modelswap_engine.protocol.engine_state import UpdateState
from modelswap_engine.protocol.errors import Busy, IncompatibleModel, ModelswapError
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.updates import RECEIVED, BeginUpdate
from modelswap_engine.sources.port import Resolved
from modelswap_engine.swap.clock import Offload
from modelswap_engine.swap.trainer.received import Received, overlaid
from modelswap_engine.swap.versions import Version

_SHORT_DIGEST = slice(7, 15)


@dataclass(kw_only=True)
class OpenUpdate:
    """An update between begin and commit.

    Attributes:
        request: as it was begun.
        below: the version that the parts are laid over: the live one, or a whole one from disk.
        restarts: how often workers had been lost when it began; what they had received is lost with them.
        deadline: the clock's reading at which the lease is over.
        hashes: name → sha256 of everything that arrived.
        held: the names among them that lie in the engine's memory.
        ranges: the names among them that lie in files.
        gone: gets an exception when the update is over.
    """

    request: BeginUpdate
    below: Version
    base: VersionRef
    restarts: int
    deadline: float = 0.0
    hashes: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    ranges: dict[str, TensorRange] = field(default_factory=dict)
    parts: list[Resolved] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def id(self) -> str:
        """The update's id."""
        return self.request.update_id

    @property
    def manifest(self) -> Manifest:
        """The manifest below the parts."""
        return self.below.manifest

    def end(self, error: ModelswapError) -> None:
        """Make everybody who works on it give up with this error."""
        if not self.gone.done():
            self.gone.set_exception(error)
            self.gone.exception()  # looked at: nobody may be waiting, and that is fine

    def take_whole(self, version: Version, *, source: str) -> None:
        """Lay what follows over a whole version from a source.

        Raises:
            Busy: parts have arrived already, and would be covered by it.
        """
        if self.hashes:
            raise Busy(
                f"update {self.id!r} has {len(self.hashes)} tensors already, a whole version would cover them",
                advice="send the whole version first, or give it names",
            )
        self.below = version
        self._note(source)

    def take_files(self, ranges: Iterable[TensorRange], *, part: Resolved, source: str) -> None:
        """Add tensors that lie in files of another checkpoint."""
        for item in ranges:
            self.hashes[item.name], self.sizes[item.name] = item.sha256, item.nbytes
            self.ranges[item.name] = item
            self.held.discard(item.name)
        self.parts.append(part)
        self._note(source)

    def take_received(self, tensors: Sequence[ReceivedTensor], *, source: str) -> None:
        """Add tensors that the engine received."""
        for item in tensors:
            self.hashes[item.name], self.sizes[item.name] = item.sha256, item.nbytes
            self.held.add(item.name)
            self.ranges.pop(item.name, None)
        self._note(source)

    def _note(self, source: str) -> None:
        if source not in self.sources:
            self.sources.append(source)

    def result(self, *, offload: Offload) -> Received:
        """Return the version that the parts make."""
        before = self.below.resolved
        kept = before if isinstance(before, Received) else None
        ranges = {n: r for n, r in kept.ranges.items() if n not in self.hashes} if kept is not None else {}
        held = kept.held - self.ranges.keys() if kept is not None else frozenset[str]()
        return Received(
            uri=RECEIVED + self.id,
            root=self.below.lasting,
            manifest=overlaid(self.manifest, self.hashes),
            files=kept.files if kept is not None else before,
            directory=self.below.directory,
            held=held | self.held,
            ranges=ranges | self.ranges,
            parts=self.parts,
            offload=offload,
        )

    def label(self, version: str, digest: str) -> str:
        """Return how the result is called: as asked, else after what it was laid over."""
        if not self.hashes:
            return version or self.below.ref.version
        return version or f"{self.below.ref.version.partition('+')[0]}+{digest[_SHORT_DIGEST]}"

    def state(self, now: float) -> UpdateState:
        """Return it as it is published."""
        return UpdateState(
            update_id=self.id,
            owner=self.request.owner,
            seconds_left=max(0.0, self.deadline - now),
            base=self.base,
            tensors=len(self.hashes),
            bytes=sum(self.sizes.values()),
            sources=list(self.sources),
        )


def check_fit(manifest: Manifest, name: str, dtype: str, shape: Sequence[int]) -> TensorEntry:
    """Return the entry that an arriving tensor takes the place of.

    Raises:
        IncompatibleModel: the running model has no such tensor, or one of another dtype or shape.
    """
    entry = manifest.by_name.get(name)
    if entry is None:
        raise IncompatibleModel(
            f"tensor {name[:200]!r} is not part of the running model",
            advice="send checkpoint names, as the manifest lists them, or name a weight loader that renames",
            details={"tensor": name[:200]},
        )
    if (entry.dtype, entry.shape) != (dtype, tuple(shape)):
        raise IncompatibleModel(
            f"tensor {name} is {dtype[:20]}{list(shape)}, the running model's is {entry.dtype}{list(entry.shape)}",
            advice="shapes and dtypes cannot change while the model runs; convert it before sending",
            details={"tensor": name, "expected": f"{entry.dtype}{list(entry.shape)}"},
        )
    return entry
