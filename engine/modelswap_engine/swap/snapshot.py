"""Remembering the hashes of live tensors, and saying which have changed since: for finding out who changes weights.

A tool for debugging: unlike an audit it has no opinion about what the tensors should be, and what it finds changes
nothing.
"""

import fnmatch
from collections.abc import Iterable, Mapping

from modelswap_engine.backends.port import Hashes
from modelswap_engine.protocol.errors import BadRequest, NotFound
from modelswap_engine.protocol.messages import CheckResult, Coordinates, TensorCheck
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.versions import Version


async def take(core: Core, version: Version, pattern: str, *, still: bool = False) -> CheckResult:
    """Remember the hashes of live tensors as they are now, instead of those remembered before.

    Raises:
        BadRequest: this is switched off, or the pattern names nothing.
        ModelswapError: the engine could not answer.
    """
    hashes = await _hashes(core, pattern, still=still)
    core.snapshot = _by_coordinates(hashes)
    return _result(version, hashes, [])


async def compare(core: Core, version: Version, pattern: str, *, still: bool = False) -> CheckResult:
    """Say which live tensors have changed since the snapshot; one that was not in it counts as changed.

    Raises:
        BadRequest: this is switched off, or the pattern names nothing.
        NotFound: no snapshot was taken.
        ModelswapError: the engine could not answer.
    """
    hashes = await _hashes(core, pattern, still=still)
    if not core.snapshot:
        raise NotFound("no snapshot of the live tensors was taken", advice="check with action Snapshot first")
    now = _by_coordinates(hashes)
    before = {key: held for key, held in core.snapshot.items() if key in now or fnmatch.fnmatchcase(key[1], pattern)}
    keys = sorted(before.keys() | now.keys())
    changed = [item for key in keys for item in _changes(key, before.get(key, {}), now.get(key, {}))]
    return _result(version, hashes, changed)


def _by_coordinates(hashes: Hashes) -> dict[tuple[Coordinates, str], dict[int, str]]:
    """Name what was hashed, by rank; a parameter that was made with a loss is known by itself."""
    names = hashes.tensors.keys() | hashes.disagreed.keys()
    found = {(Coordinates.CHECKPOINT, name): hashes.by_rank(name) for name in names}
    return found | {
        (Coordinates.RUNTIME, item.name): dict.fromkeys(hashes.ranks, item.actual) for item in hashes.runtime
    }


def _changes(key: tuple[Coordinates, str], before: Mapping[int, str], now: Mapping[int, str]) -> Iterable[TensorCheck]:
    found: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(before.keys() | now.keys()):
        found.setdefault((before.get(rank, ""), now.get(rank, "")), []).append(rank)
    for (expected, actual), ranks in found.items():
        if expected != actual:
            yield TensorCheck(name=key[1], expected=expected, actual=actual, ranks=ranks, coordinates=key[0])


async def _hashes(core: Core, pattern: str, *, still: bool) -> Hashes:
    if not core.settings.debug_checks:
        raise BadRequest(
            "snapshots of the live tensors are switched off", advice="start the engine with --debug-checks"
        )
    with core.preemptible() as preempted:
        hashes = await core.engine.hashes(pattern, unless=preempted, still=still)
    if not hashes.tensors and not hashes.disagreed and not hashes.runtime:
        raise BadRequest(
            f"no tensor that can be read back matches {pattern[:200]!r}",
            advice="use a glob of checkpoint tensor names, for example 'model.layers.0.*'",
        )
    return hashes


def _result(version: Version, hashes: Hashes, changed: list[TensorCheck]) -> CheckResult:
    return CheckResult(
        digest=version.digest,
        ok=not changed,
        checked=len(hashes.tensors) + len(hashes.disagreed) + len(hashes.runtime),
        bytes=hashes.bytes,
        seconds=hashes.seconds,
        mismatched=changed,
        tensors=hashes.tensors,
        runtime={item.name: item.actual for item in hashes.runtime},
        ranks=list(hashes.ranks),
        disagreed=hashes.disagreed,
    )
