"""What a swap would do, and why it would be refused. Pure: manifests, groups and figures go in, a decision comes out.

Nothing is touched before the decision is known, so a refused version costs the running one nothing. All refusals are
found, not only the first. It knows no source, no backend and no clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.checkpoint.diff import Diff, diff
from modelswap_engine.checkpoint.groups import touched_groups
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.checkpoint.sidefiles import SideChange, refusals
from modelswap_engine.checkpoint.siderules import Verdict
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState
from modelswap_engine.protocol.errors import (
    DigestMismatch,
    IncompatibleModel,
    InsufficientMemory,
    Refused,
    UnsupportedChange,
)
from modelswap_engine.protocol.messages import Plan, PlanRequest, VersionRef
from modelswap_engine.protocol.policy import LoadingMode, OnTimeout, Traffic, TrafficMode
from modelswap_engine.swap.companion import NO_EFFECT, Effect
from modelswap_engine.swap.room import more_room

MIB: Final = 1 << 20
POLICIES: Final = {
    TrafficMode.DRAIN: RequestPolicy.NONE_RUNNING,
    TrafficMode.OVERLAP: RequestPolicy.OVERLAP,
    TrafficMode.RECOMPUTE: RequestPolicy.RECOMPUTE,
    TrafficMode.FREEZE: RequestPolicy.FREEZE,
    TrafficMode.ABORT: RequestPolicy.ABORT,
}
"""What the engine is told about running requests, by mode; a mode that is not here has no way through this engine."""

FALLBACKS: Final = {
    OnTimeout.RECOMPUTE_REQUESTS: TrafficMode.RECOMPUTE,
    OnTimeout.ABORT_REQUESTS: TrafficMode.ABORT,
}
"""The mode that a Drain turns into when its time is over."""

CONTINUING: Final = (TrafficMode.RECOMPUTE, TrafficMode.FREEZE)
"""The modes in which requests that were let in to the old version go on on the new one."""

COPY: Final = "copy"
"""The commit method that writes into live memory, and so has to save what was there."""

_COLD: Final = "serve this version by a cold restart: set it in the pods' template and restart them"
_NAMED: Final = 5


@dataclass(frozen=True)
class Nothing:
    """The wanted digest is live already."""


@dataclass(frozen=True)
class UseRetained:
    """The wanted version is the retained previous one: nothing is read."""


@dataclass(frozen=True)
class ReadTensors:
    """These tensors are read and staged; ``drop_previous`` makes room first."""

    names: tuple[str, ...]
    drop_previous: bool


Work = Nothing | UseRetained | ReadTensors


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the decision is made on.

    ``previous`` is the digest of the retained version or "", ``reserve`` what staging must leave free, ``side`` what
    changed in the side files from the live to the target version, ``resident`` the tensors that need not be read
    because the engine has received them. ``drifted`` are live tensors that are not what the live version says;
    ``previous_limit`` is how many bytes a retained version may take, -1 for any. ``adapters`` is what the change of
    the base does to the adapters on it, ``replicas`` how many copies of the model stage it, ``signer`` who vouches for
    the target.
    """

    live: VersionRef
    live_manifest: Manifest
    target_manifest: Manifest
    groups: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...] = ()
    side: Sequence[SideChange]
    previous: str
    memory: MemoryState
    capabilities: Capabilities
    reserve: int
    resident: frozenset[str] = frozenset()
    drifted: frozenset[str] = frozenset()
    previous_limit: int = -1
    adapters: Effect = NO_EFFECT
    replicas: int = 1
    signer: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The plan as it is published, the work when there are no refusals, and what may be done on the way.

    ``continuable``: old requests could go on. ``keep_previous``: the tensors that go stay in memory.
    """

    plan: Plan
    work: Work
    continuable: bool
    keep_previous: bool
    refusals: tuple[Refused, ...]


def decide(situation: Situation, request: PlanRequest) -> Decision:
    """Return what the swap would do."""
    target = situation.target_manifest
    change = diff(situation.live_manifest, target)
    mode = _mode(situation, request)
    names = tuple(sorted(_names(situation, change, mode)))
    overlap = request.traffic.mode is TrafficMode.OVERLAP
    work = _work(situation, request, names)
    fetched = _bytes(target, _absent(situation, names)) if isinstance(work, ReadTensors) else 0
    needed = _memory_needed(situation, work, names, overlap=overlap)
    refused = tuple(_refusals(situation, request, change, work=work, needed=needed))
    groups = [] if isinstance(work, Nothing) else touched_groups(names, situation.groups)
    plan = Plan(
        from_digest=situation.live.digest,
        to_digest=target.digest,
        mode=mode,
        changed_tensors=len(change.changed),
        changed_bytes=_bytes(target, change.changed),
        total_tensors=len(target.tensors),
        total_bytes=target.total_bytes,
        groups=len(groups),
        bytes_to_fetch=fetched,
        side_files=[f"{c.file}: {c.key}" if c.key else c.file for c in situation.side if c.verdict is Verdict.APPLIED],
        memory_needed=needed,
        memory_available=situation.memory.room_bytes,
        refusals=[error.body() for error in refused],
        changed_names=sorted({*change.changed, *situation.drifted}),
        adapters=list(situation.adapters.changes),
        provenance=msgspec.to_builtins(target.provenance) if target.provenance else {},
        signed_by=situation.signer,
    )
    return Decision(
        plan=plan,
        work=work,
        continuable=not (any(item.interrupts for item in situation.side) or situation.adapters.changes),
        keep_previous=request.loading.keep_previous and _retainable(situation, names),
        refusals=refused,
    )


def _retainable(situation: Situation, names: Sequence[str]) -> bool:
    """Say whether what the swap replaces may stay in memory: it is sound, and not too large."""
    fits = situation.previous_limit < 0 or _bytes(situation.live_manifest, names) <= situation.previous_limit
    return fits and not situation.drifted


def _mode(situation: Situation, request: PlanRequest) -> LoadingMode:
    if request.loading.mode is not LoadingMode.AUTO:
        return request.loading.mode
    known = situation.live_manifest.complete and situation.target_manifest.complete
    return LoadingMode.DIFF if known else LoadingMode.FULL


def _names(situation: Situation, change: Diff, mode: LoadingMode) -> set[str]:
    """Return the tensors to stage: whole groups, and only what the engine reads and the target has."""
    wanted = set(change.changed) if mode is LoadingMode.DIFF else set(situation.target_manifest.by_name)
    wanted |= situation.drifted
    groups = touched_groups(wanted, situation.groups)
    return {name for group in groups for name in group if name in situation.target_manifest.by_name}


def _work(situation: Situation, request: PlanRequest, names: tuple[str, ...]) -> Work:
    target = situation.target_manifest.digest
    if target == situation.live.digest and not situation.drifted:
        return Nothing()
    if situation.drifted:
        return ReadTensors(names, drop_previous=True)  # what is retained may be damaged like what is live
    if target == situation.previous and request.loading.mode is not LoadingMode.FULL:
        return UseRetained()
    free = _free(situation)
    overlap = request.traffic.mode is TrafficMode.OVERLAP
    needed = _memory_needed(situation, ReadTensors(names, drop_previous=False), names, overlap=overlap)
    return ReadTensors(names, drop_previous=free is not None and needed > free and situation.memory.previous_bytes > 0)


def _memory_needed(situation: Situation, work: Work, names: tuple[str, ...], *, overlap: bool) -> int:
    """Return the bytes that the swap takes beside the live ones until it is over.

    They are what is read, and what is saved before it is written over, or a second instance. Every copy of the model
    takes them; the ranks of one copy share them.
    """
    if isinstance(work, Nothing):
        return 0
    target = situation.target_manifest
    read = _bytes(target, _absent(situation, names)) if isinstance(work, ReadTensors) else 0
    if overlap:
        return read * situation.replicas + situation.memory.instance_bytes
    return (read + (_bytes(target, names) if situation.capabilities.commit_method == COPY else 0)) * situation.replicas


def _absent(situation: Situation, names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in situation.resident]


def _free(situation: Situation) -> int | None:
    """Return the bytes that staging may take without dropping anything, None when nothing bounds it."""
    available = situation.memory.room_bytes
    return None if available < 0 else max(0, available - situation.reserve)


def _refusals(
    situation: Situation, request: PlanRequest, change: Diff, *, work: Work, needed: int
) -> Iterator[Refused]:
    yield from _pin(request.target.digest, situation.target_manifest.digest)
    yield from situation.adapters.refusals
    if isinstance(work, Nothing):
        return
    yield from _layout(situation, change)
    yield from _tied(situation)
    continues = request.traffic.mode in CONTINUING
    yield from refusals(situation.side, continues_requests=continues)
    yield from _adapters(situation) if continues else ()
    yield from _traffic(request.traffic, situation)
    overlap = request.traffic.mode is TrafficMode.OVERLAP
    yield from _memory(situation, work, needed, second=situation.memory.instance_bytes if overlap else 0)


def _adapters(situation: Situation) -> Iterator[Refused]:
    """Requests that would go on with an adapter which is not on the new base any more."""
    if situation.adapters.changes:
        yield UnsupportedChange(
            f"adapters change with the base ({'; '.join(situation.adapters.changes[:_NAMED])}): requests that use them "
            "cannot go on on the new weights",
            advice="use a traffic mode that lets them end (Drain, Overlap) or ends them (Abort)",
        )


def _pin(pin: str, digest: str) -> Iterator[Refused]:
    if pin and pin != digest:
        yield DigestMismatch(
            f"the source holds {digest}, pinned is {pin}",
            advice="correct the pin, or put the pinned content back at the source",
            details={"expected": pin, "actual": digest},
        )


def _layout(situation: Situation, change: Diff) -> Iterator[Refused]:
    live, target = situation.live_manifest, situation.target_manifest
    if live.architecture != target.architecture:
        yield IncompatibleModel(
            f"the architecture is {target.architecture or 'unknown'}, {live.architecture or 'unknown'} is running",
            advice=_COLD,
            details={"expected": live.architecture, "actual": target.architecture},
        )
    for names, what in ((change.removed, "missing"), (change.added, "not part of the running model")):
        if names:
            yield IncompatibleModel(f"{_list(names)}: {what}", advice=_COLD, details={"tensor": names[0]})
    for names, field in ((change.reshaped, "shape"), (change.retyped, "dtype")):
        if names:
            expected, actual = (_fact(manifest, names[0], field) for manifest in (live, target))
            yield IncompatibleModel(
                f"{_list(names)}: {field} {actual}, the running model has {expected}",
                advice=_COLD,
                details={"tensor": names[0], "expected": expected, "actual": actual},
            )


def _tied(situation: Situation) -> Iterator[Refused]:
    target = situation.target_manifest.by_name
    for names in situation.tied:
        first, *others = [name for name in names if name in target] or [""]
        for name in others:
            if target[name].sha256 != target[first].sha256:
                yield IncompatibleModel(
                    f"tensors {first} and {name} are tied in the running model, but differ in this version",
                    advice="save the checkpoint with equal tensors, or with only one of them",
                    details={"tensor": name, "tiedTo": first},
                )


def _traffic(traffic: Traffic, situation: Situation) -> Iterator[Refused]:
    capabilities = situation.capabilities
    possible = [mode for mode in capabilities.traffic_modes if mode in POLICIES]
    wanted = [(traffic.mode, "traffic mode", traffic.mode.value)]
    if traffic.mode is TrafficMode.DRAIN and traffic.on_timeout in FALLBACKS:
        wanted.append((FALLBACKS[traffic.on_timeout], "onTimeout", traffic.on_timeout.value))
    for mode, what, value in wanted:
        if mode not in possible:
            yield UnsupportedChange(
                f"{what} {value} is not possible with the {capabilities.kind} engine{_why(capabilities, mode)}",
                advice=f"use a traffic mode of: {', '.join(possible)}",
                details={"possible": ",".join(possible)},
            )

    if traffic.mode is TrafficMode.OVERLAP and situation.drifted:
        yield UnsupportedChange(
            "an Overlap would go on answering with live tensors that are not what their version says",
            advice=f"use traffic mode {TrafficMode.ABORT}",
        )


def _why(capabilities: Capabilities, mode: TrafficMode) -> str:
    reason = capabilities.refused_modes.get(mode, "")
    return f": {reason}" if reason else ""


def _memory(situation: Situation, work: Work, needed: int, *, second: int) -> Iterator[Refused]:
    free = _free(situation)
    # Dropping the retained version makes room, unless it is what is wanted.
    droppable = situation.memory.previous_bytes if isinstance(work, ReadTensors) else 0
    if free is None or needed <= free + droppable:
        return
    yield InsufficientMemory(
        f"staging{' with a second instance' if second else ''} needs {_mib(needed)} MiB, {_mib(free)} MiB may be used"
        f" (and {_mib(droppable)} MiB of the retained previous version)",
        advice=more_room(situation.memory) + (", or use another traffic mode" if second else ""),
        details={"neededMiB": _mib(needed), "availableMiB": _mib(free + droppable)},
    )


def _bytes(manifest: Manifest, names: Sequence[str]) -> int:
    return sum(manifest.by_name[name].nbytes for name in names if name in manifest.by_name)


def _fact(manifest: Manifest, name: str, field: str) -> str:
    entry = manifest.by_name[name]
    return entry.dtype if field == "dtype" else str(list(entry.shape))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_NAMED])}{more}"


def _mib(number: int) -> str:
    return f"{number / MIB:.1f}"
