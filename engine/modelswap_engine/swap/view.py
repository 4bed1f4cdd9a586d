"""The engine's state as it is published: everything in one message, composed without asking anybody."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from modelswap_engine.protocol.engine_state import (
    EngineState,
    GateState,
    LeaseState,
    LockState,
    RankState,
    ReaderState,
)
from modelswap_engine.swap.core import Core

_NAMES_SHOWN: Final = 100
_READERS_SHOWN: Final = 20


def engine_state(core: Core) -> EngineState:
    """Return the one view of everything."""
    accepted = core.journal.state.accepted
    settings = core.settings
    reason, message = ("Stopping", "the engine is stopping") if core.stopping else (core.reason, core.message)
    ranks = list(core.backend.ranks())
    return EngineState(
        software=settings.software,
        pod_uid=settings.pod_uid,
        boot_id=settings.boot_id,
        seq=core.seq,
        ready=core.ready,
        reason=reason,
        message=message or (_degraded(core, ranks) if core.live is not None and not core.engine.healthy else ""),
        quarantined=core.quarantined,
        load_failure=core.load_failure if core.live is None else None,
        served_model_name=settings.served_model_name,
        owner_uid=accepted.owner_uid if accepted is not None else "",
        epoch=accepted.epoch if accepted is not None else 0,
        revision=accepted.revision if accepted is not None else 0,
        decided=accepted.target if accepted is not None and accepted.done else None,
        live=core.live_ref(),
        previous=core.previous.ref if core.previous is not None else None,
        previous_seconds_left=-1.0 if core.previous_seconds_left is None else core.previous_seconds_left,
        drifted=list(core.drift.names[:_NAMES_SHOWN]),
        repairs=core.drift.repaired,
        repair=core.operations.own.status if core.operations.own is not None else None,
        restart_advice=core.memory.growth.advice,
        gate=gate_state(core),
        lock=lock_state(core),
        operation=core.current_status(),
        update=core.update.state(core.clock.monotonic()) if core.update is not None else None,
        ranks=ranks,
        memory=core.memory.state,
        audit=core.audit,
        last_check=core.last_check,
        assignment_revision=accepted.revision if accepted is not None and accepted.owned else 0,
        capabilities=core.backend.capabilities(),
        swaps_completed=core.completed,
        restarts=core.restarts,
        adapters=core.companion.view(),
        prefetch=core.prefetched,
    )


def _degraded(core: Core, ranks: Sequence[RankState]) -> str:
    """Say who does not serve while the others do."""
    away = sorted(rank.rank for rank in ranks if not (rank.alive and rank.digest))
    if not away:
        return ""
    who = f"ranks {', '.join(map(str, away))} of {len(ranks)}"
    return f"{who} are away: {core.away}" if core.away else f"{who} are being restarted"


def gate_state(core: Core) -> GateState:
    """Return how the door stands and who is inside."""
    lease = core.gate.lease
    return GateState(
        open=core.gate.is_open,
        queued=core.gate.queued,
        oldest_queued_seconds=core.gate.oldest_seconds,
        holders=list(core.gate.holders),
        in_flight=core.lock.inside,
        oldest_in_flight_seconds=core.lock.oldest_seconds,
        closures=core.gate.closures,
        waits=core.gate.waits,
        lease_id=lease.id if lease is not None else "",
        lease_owner=lease.owner if lease is not None else "",
        lease_seconds_left=max(0.0, lease.deadline - core.clock.monotonic()) if lease is not None else 0.0,
        leases=[
            LeaseState(id=held.id, owner=held.owner, seconds_left=max(0.0, held.deadline - core.clock.monotonic()))
            for held in core.gate.leases
        ],
    )


def lock_state(core: Core) -> LockState:
    """Return who is inside and who wants everybody out."""
    lock, now = core.lock, core.clock.monotonic()
    readers = lock.readers()
    return LockState(
        writer=lock.writer,
        writer_seconds=now - lock.writer_since if lock.claimed else 0.0,
        readers=len(readers),
        admitting=sum(not reader.submitted for reader in readers),
        by_version=dict(Counter(reader.version for reader in readers)),
        oldest=[
            ReaderState(
                request_id=reader.request_id,
                version=reader.version,
                submitted=reader.submitted,
                seconds=now - reader.since,
            )
            for reader in readers[:_READERS_SHOWN]
        ],
    )
