"""Finished revisions with their figures, and the versions the slot has been proved good at."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from modelswap_engine.protocol.messages import Plan, SwapStatus
from modelswap_engine.protocol.states import SwapState
from modelswap_operator.api import estimates
from modelswap_operator.api.modelversion import PlanStatus, ProvenanceStatus, Revision, StableStatus
from modelswap_operator.api.times import stamp
from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.errors import text
from modelswap_operator.status.conditions import cut

PLANS_LISTED = 20
ADAPTERS_LISTED = 50
REFUSALS_LISTED = 20
ORIGIN_LENGTH = 256
SIGNER_LENGTH = 320


def stable(a: Assessment) -> StableStatus | None:
    """Return the last version that every counted pod proved; a rollout under way does not change it."""
    current, before = a.snapshot.assignment, a.snapshot.status.stable
    if current is None or current.stable is None:
        return before
    here = StableStatus(revision=current.revision, version=current.stable.version, digest=current.stable.digest)
    if before is not None and (before.digest, before.version) == (here.digest, here.version):
        return before
    if a.done:
        return here
    return before or (here if here.digest != a.target_digest else None)


def history(a: Assessment, *, result: str, now: datetime) -> tuple[Revision, ...]:
    """Return the history with the present rollout added once it has ended with ``result`` (empty: it has not)."""
    entries = list(a.snapshot.status.history)
    replaced = _superseded(a, entries, now)
    if replaced is not None:
        entries.insert(0, replaced)
    if result and not _told(a, entries, result):
        entries.insert(0, _entry(a, result=result, now=now))
    return tuple(entries[: a.spec.revision_history_limit])


def _told(a: Assessment, entries: list[Revision], result: str) -> bool:
    if not entries:
        return False
    last = entries[0]
    same = (last.version, last.digest, last.result) == (a.spec.version, a.target_digest, result)
    return same and (a.failure is None or last.completion_time >= a.failure.time)


def _entry(a: Assessment, *, result: str, now: datetime) -> Revision:
    current = a.snapshot.assignment
    done = [
        p.state.operation
        for p in a.counted
        if p.state is not None
        and p.state.operation is not None
        and p.state.operation.state is SwapState.SERVING
        and p.state.operation.target.digest == a.target_digest
    ]
    return Revision(
        revision=current.revision if current is not None else 0,
        version=a.spec.version,
        digest=a.target_digest,
        source=a.spec.source.uri,
        start_time=a.snapshot.spec_time,
        completion_time=stamp(now),
        result=result,
        commit_window_microseconds=round(max((o.commit_window_microseconds or 0 for o in done), default=0)),
        bytes_fetched=sum(o.bytes_fetched for o in done),
        staging_bytes_per_second=_rate(done),
        field_manager=a.snapshot.spec_manager,
        **_origin(a, done),
    )


def _origin(a: Assessment, done: Iterable[SwapStatus]) -> dict[str, Any]:
    """Return what the manifest said of where the version comes from, and who vouched for it, as pods told."""
    plans = [result.plan for result in a.plans.values()] + [operation.plan for operation in done]
    found = next((p for p in plans if p is not None and p.to_digest == a.target_digest), None)
    if found is None:
        return {}
    said = {key: cut(value, ORIGIN_LENGTH) for key, value in found.provenance.items()}
    provenance = msgspec.convert(said, ProvenanceStatus) if said else None
    return {"provenance": provenance, "signed_by": cut(found.signed_by, SIGNER_LENGTH)}


def _rate(done: Iterable[SwapStatus]) -> int:
    """Return how many bytes a second the slowest pod read and staged; 0 where that was not measured."""
    rates = [o.bytes_travelled / o.staging_seconds for o in done if o.bytes_travelled > 0 and o.staging_seconds]
    return max(1, round(min(rates))) if rates else 0


def _superseded(a: Assessment, entries: list[Revision], now: datetime) -> Revision | None:
    """Return an entry for the former target when the spec moved on before its rollout ended."""
    status = a.snapshot.status
    before = status.target
    if before is None or not before.digest or before.version == a.spec.version:
        return None
    ended = status.observed_generation >= 0 and any(
        (e.version, e.digest) == (before.version, before.digest) and e.revision >= before.revision for e in entries
    )
    settled = status.stable is not None and status.stable.digest == before.digest
    if ended or settled or any(f.digest == before.digest for f in status.failures):
        return None
    return Revision(
        revision=before.revision,
        version=before.version,
        digest=before.digest,
        source=before.resolved_uri,
        completion_time=stamp(now),
        result="Superseded",
    )


def _plan(a: Assessment, plan: Plan) -> PlanStatus:
    known = a.snapshot.status.history
    expected = estimates.staging(known, digest=plan.to_digest, bytes_to_fetch=plan.bytes_to_fetch)
    return PlanStatus(
        staging_seconds=expected.seconds if expected is not None else 0,
        staging_basis=cut(expected.basis, 256) if expected is not None else "",
        from_digest=plan.from_digest,
        changed_tensors=plan.changed_tensors,
        total_tensors=plan.total_tensors,
        changed_bytes=plan.changed_bytes,
        total_bytes=plan.total_bytes,
        mode=plan.mode.value,
        groups=plan.groups,
        bytes_to_fetch=plan.bytes_to_fetch,
        memory_needed_bytes=plan.memory_needed,
        adapters=tuple(cut(line, 512) for line in plan.adapters[:ADAPTERS_LISTED]),
        refusals=tuple(cut(f"{error.code}: {text(error)}", 1024) for error in plan.refusals[:REFUSALS_LISTED]),
    )


def plans(a: Assessment) -> tuple[PlanStatus, ...]:
    """Return what swaps to the target do: from answers of this process, from pods' operations, else as shown before."""
    found: dict[str, PlanStatus] = {}
    answers = [result.plan for result in a.plans.values() if result.plan is not None]
    operations = (p.state.operation for p in a.counted if p.state is not None)
    answers += [o.plan for o in operations if o is not None and o.plan is not None and o.plan.changed_tensors]
    for plan in answers:
        if a.target is not None and plan.to_digest == a.target.digest and plan.from_digest != plan.to_digest:
            found.setdefault(
                plan.from_digest,
                _plan(a, plan),
            )
    status = a.snapshot.status
    if status.target is not None and a.target is not None and status.target.digest == a.target.digest:
        for shown in status.plan:
            found.setdefault(shown.from_digest, shown)
    return tuple(found[key] for key in sorted(found))[:PLANS_LISTED]
