"""Loading a whole version: at start, after a worker was lost, and out of quarantine.

Whatever the engine held before is gone afterwards; what it holds then is proved by hash. The caller has the mutex.
"""

import asyncio

from modelswap_engine.backends.port import Load
from modelswap_engine.protocol.errors import (
    DigestMismatch,
    InsufficientMemory,
    InvalidCheckpoint,
    ManifestMismatch,
    ModelswapError,
)
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.sources.port import Resolved
from modelswap_engine.swap import sourcing
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.room import more_room
from modelswap_engine.swap.settings import MIB
from modelswap_engine.swap.versions import Version


async def find(core: Core, ref: VersionRef, *, unless: asyncio.Future[None] | None = None) -> Resolved:
    """Resolve a version and hold it against its pin.

    Raises:
        DigestMismatch: the source holds something else than the digest says.
        ModelswapError: of the source.
    """
    resolved = await sourcing.resolve(core, ref, unless=unless)
    digest = resolved.manifest.digest
    if ref.digest and ref.digest != digest:
        raise DigestMismatch(
            f"{ref.uri} holds {digest}, pinned is {ref.digest}",
            advice="correct the pin, or put the pinned content back at the source",
            details={"expected": ref.digest, "actual": digest},
        )
    return resolved


async def prepare(core: Core, resolved: Resolved, *, asked: VersionRef) -> Version:
    """Copy the side files and let the listeners load what they need."""
    version: Version = await core.bounded(
        "copying side files", core.store.materialise(resolved, asked=asked), core.settings.stage_seconds
    )
    for listener in core.listeners:
        await core.bounded(
            "preparing the tokenizer", listener.prepare(version.digest, version.directory), core.settings.stage_seconds
        )
    return version


async def load(
    core: Core,
    resolved: Resolved,
    *,
    asked: VersionRef,
    operation_id: str,
    unless: asyncio.Future[None] | None = None,
) -> Version:
    """Load a resolved version into every rank and make it the live one, unless told to give up.

    Raises:
        InsufficientMemory: the container cannot hold it; the engine was not touched.
        ModelswapError: it is not live; the engine may hold nothing at all.
    """
    await _require_memory(core, resolved.manifest.total_bytes * core.engine.replicas)
    return await _load(core, resolved, asked=asked, operation_id=operation_id, unless=unless)


async def refill(core: Core, version: Version, *, operation_id: str) -> None:
    """Load the live version again into the replicas that were lost, while those that hold it serve.

    What lies at no source is taken from one of them.

    Raises:
        InsufficientMemory: the container cannot hold it; the engine was not touched.
        ModelswapError: the lost replicas are still away.
    """
    resolved = version.resolved if not version.lasts else await find(core, version.ref)
    order = _order(resolved, version, operation_id=operation_id, keep_proven=True)
    passing = sum(item.nbytes for item in order.tensors if not item.path)
    room = await core.memory.room()
    _require(passing + resolved.manifest.total_bytes * core.engine.missing, room, core)
    before = core.held()
    await _load(core, resolved, asked=version.ref, operation_id=operation_id, keep_proven=True)
    await core.engine.release(operation_id, previous=True)  # those that were lost have no version to go back to
    await core.forget(*before)


def _order(resolved: Resolved, version: Version, *, operation_id: str, keep_proven: bool) -> Load:
    return Load(
        operation_id=operation_id,
        digest=version.digest,
        directory=str(version.directory),
        tensors=tuple(resolved.range_of(entry.name) for entry in resolved.manifest.tensors),
        keep_proven=keep_proven,
    )


async def _load(
    core: Core,
    resolved: Resolved,
    *,
    asked: VersionRef,
    operation_id: str,
    keep_proven: bool = False,
    unless: asyncio.Future[None] | None = None,
) -> Version:
    with core.store.pin(resolved.manifest.digest):
        version = await prepare(core, resolved, asked=asked)
        await sourcing.obtain(core, resolved, [entry.name for entry in resolved.manifest.tensors], unless=unless)
        order = _order(resolved, version, operation_id=operation_id, keep_proven=keep_proven)
        try:
            kept = await core.engine.load(order, unless=unless)
        except (ManifestMismatch, InvalidCheckpoint):
            # Overwritten under the reader is not a bad version.
            await core.bounded("the source", resolved.unchanged(suspected=True), core.settings.resolve_seconds)
            raise
        if not kept:
            await core.companion.restore(version.ref)
        await core.refresh_memory()
        if unless is not None and unless.done():
            unless.result()
        core.publish(version, previous=None)
        core.away = ""
        if not kept:  # which may hold tensors that are known to be damaged
            core.loaded()
        core.quarantined = False
        core.loaded_at = core.clock.monotonic()
    return version


async def _require_memory(core: Core, needed: int) -> None:
    """Refuse a load that the container cannot hold: being killed for memory halfway takes everything down.

    What the engine holds now is gone before the new tensors come, so it counts as available.

    Raises:
        InsufficientMemory: it does not fit.
    """
    try:
        await core.refresh_memory()
    except ModelswapError:
        if any(rank.alive for rank in core.backend.ranks()):
            return  # what it holds cannot be known, and a guess must not keep a version from being served
        await core.memory.refresh_limits()
    memory = core.memory.state
    if memory.room_bytes < 0:
        return
    held = memory.model_bytes + memory.staged_bytes + memory.previous_bytes
    _require(needed, memory.room_bytes + held, core)


def _require(needed: int, room: int, core: Core) -> None:
    if room < 0:
        return
    usable = max(0, room - core.settings.memory_reserve)
    if needed > usable:
        raise InsufficientMemory(
            f"loading needs {needed / MIB:.1f} MiB, {usable / MIB:.1f} MiB may be used",
            advice=more_room(core.memory.state),
            details={"neededMiB": f"{needed / MIB:.1f}", "availableMiB": f"{usable / MIB:.1f}"},
        )


async def reload(core: Core, ref: VersionRef, *, operation_id: str) -> Version:
    """Find a version again at its source and load it.

    Raises:
        ModelswapError: it is not live; the engine may hold nothing at all.
    """
    before = core.held()
    resolved = await find(core, ref)
    version = await load(core, resolved, asked=ref, operation_id=operation_id)
    await core.forget(*before)
    return version
