"""How far the pods are with what they fetch ahead. Pure."""

from modelswap_engine.protocol.prefetch import PrefetchPhase, PrefetchState
from modelswap_operator.api.modelversion import PrefetchStatus
from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.prefetch import targets
from modelswap_operator.status.conditions import cut


def prefetched(a: Assessment) -> tuple[PrefetchStatus, ...]:
    """Return a row for each version that is to be fetched."""
    found = [(p.name, row) for p in a.counted if p.state is not None for row in p.state.prefetch]
    return tuple(
        _row(target.uri, target.digest, [(name, row) for name, row in found if row.target == target])
        for target in targets(a)
    )


def _row(uri: str, pin: str, rows: list[tuple[str, PrefetchState]]) -> PrefetchStatus:
    failed = next(((name, row.error) for name, row in rows if row.error is not None), None)
    return PrefetchStatus(
        uri=uri,
        digest=pin or next((row.digest for _, row in rows if row.digest), ""),
        fetched_pods=sum(row.phase is PrefetchPhase.FETCHED for _, row in rows),
        message=cut(f"pod {failed[0]}: {failed[1].message}") if failed is not None else "",
    )
