"""Reading the live tensors back and comparing them with the manifest of the version that must be live.

A difference means that the engine would answer with weights nobody chose: nobody is answered until it is repaired.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from modelswap_engine.backends.port import Hashes
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.protocol.engine_state import AuditState
from modelswap_engine.protocol.errors import BadRequest, Busy, DigestMismatch, ModelswapError, WorkerLost
from modelswap_engine.protocol.messages import CheckResult, Coordinates, TensorCheck
from modelswap_engine.swap import recovery
from modelswap_engine.swap.core import Core, log
from modelswap_engine.swap.versions import Version


def compare(manifest: Manifest, hashes: Hashes, *, groups: Iterable[Iterable[str]], pattern: str) -> list[TensorCheck]:
    """Return the tensors that are not what they must be; one that the engine did not answer for counts too."""
    read = {name for group in groups for name in group}
    expected = {
        entry.name: entry.sha256
        for entry in manifest.tensors
        if entry.name in read and fnmatch.fnmatchcase(entry.name, pattern) and entry.name not in hashes.unverifiable
    }
    return [
        *_differences(expected, hashes),
        *(
            TensorCheck(
                name=item.name,
                expected=item.expected,
                actual=item.actual,
                ranks=list(item.ranks or hashes.ranks),
                coordinates=Coordinates.RUNTIME,
            )
            for item in hashes.runtime
            if item.actual != item.expected
        ),
    ]


def _differences(expected: Mapping[str, str], hashes: Hashes) -> Iterable[TensorCheck]:
    for name in sorted(expected.keys() | hashes.tensors.keys() | hashes.disagreed.keys()):
        wanted, wrong = expected.get(name, ""), dict[str, list[int]]()
        for rank, actual in sorted(hashes.by_rank(name).items()):
            if actual != wanted:
                wrong.setdefault(actual, []).append(rank)
        for actual, ranks in wrong.items():
            yield TensorCheck(name=name, expected=wanted, actual=actual, ranks=ranks)


async def check(
    core: Core, version: Version, pattern: str, *, bytes_per_second: int = 0, still: bool = False
) -> CheckResult:
    """Re-hash live tensors; a mismatch holds all requests until it is repaired. The caller has the mutex.

    Raises:
        Busy: a swap or a recovery came first.
        BadRequest: nothing that the pattern names can be read back.
        ModelswapError: the engine could not answer.
    """
    with core.preemptible() as preempted:
        hashes = await core.engine.hashes(pattern, unless=preempted, bytes_per_second=bytes_per_second, still=still)
    mismatched = compare(version.manifest, hashes, groups=core.engine.groups(), pattern=pattern)
    read = {name for group in core.engine.groups() for name in group}
    unverifiable = sorted(read.intersection(hashes.unverifiable) - {name for r in hashes.runtime for name in r.sources})
    if not hashes.tensors and not hashes.runtime and not mismatched:
        hidden = bool(unverifiable) and not still
        raise BadRequest(
            f"no tensor that can be read back matches {pattern[:200]!r}",
            advice="check with still: this engine shows them while it computes nothing"
            if hidden
            else "use a glob of checkpoint tensor names, for example 'model.layers.0.*'",
        )
    if mismatched:
        _found(core, version, mismatched, hashes)
    return CheckResult(
        digest=version.digest,
        ok=not mismatched,
        checked=len(hashes.tensors) + len(hashes.disagreed) + len(hashes.runtime),
        bytes=hashes.bytes,
        seconds=hashes.seconds,
        mismatched=mismatched,
        tensors=hashes.tensors,
        ranks=list(hashes.ranks),
        disagreed=hashes.disagreed,
        runtime={item.name: item.actual for item in hashes.runtime},
        unread=sorted(set(hashes.unverifiable) - read),
        unverifiable=unverifiable,
    )


def _found(core: Core, version: Version, mismatched: Sequence[TensorCheck], hashes: Hashes) -> None:
    first, names = mismatched[0], {item.name for item in mismatched}
    ranks = ", ".join(map(str, first.ranks))
    error = DigestMismatch(
        f"{len(names)} live tensors are not those of {version.digest}, the first is {first.name} on rank {ranks}",
        advice="look for damaged memory if it happens again",
        details={"tensor": first.name, "expected": first.expected, "actual": first.actual, "ranks": ranks},
    )
    log.error("%s", error.message)
    if core.settings.repair_attempts > 0 and version.lasts:  # what was sent cannot be had again
        made_of = {item.name: item.sources for item in hashes.runtime}
        core.drifted(sorted({n for item in mismatched for n in made_of.get(item.name, (item.name,))}), error.body())
    else:
        core.unpublish("Quarantined", error.body(), quarantine=True)


def due(core: Core) -> bool:
    """Say whether the last audit is so long ago that the next one should be made."""
    every = core.settings.audit_seconds
    return every > 0 and core.clock.monotonic() - core.audited_at >= every


def audit(core: Core) -> None:
    """Re-hash everything in the background and remember the result; one at a time, giving way to swaps."""
    if not core.audit_pending:
        core.audit_pending = True
        core.tasks.spawn(_audit(core))


async def _audit(core: Core) -> None:
    try:
        while await _preempted(core):
            pass  # whoever came first is before us in the line for the mutex
    finally:
        core.audit_pending, core.audited_at = False, core.clock.monotonic()


async def _preempted(core: Core) -> bool:
    async with core.mutex:
        version = core.live
        if version is None:
            return False
        try:
            result = await check(core, version, "*", bytes_per_second=core.settings.audit_bytes_per_second)
        except Busy:
            return True
        except ModelswapError as error:
            log.warning("the audit of %s could not be made: %s", version.digest, error.message)
            if isinstance(error, WorkerLost):
                await recovery.revive(core, version, operation_id="audit")
            return False
        core.audit = AuditState(
            digest=version.digest,
            ok=result.ok,
            tensors=result.checked,
            bytes=result.bytes,
            seconds=result.seconds,
            mismatched=list(dict.fromkeys(item.name for item in result.mismatched)),
            finished_at=core.clock.timestamp(),
        )
        core.touch()
        return False
