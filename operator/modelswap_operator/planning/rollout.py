"""Which pods may be swapped now: ``maxUnavailable`` against what is unavailable already, counted afresh each time."""

from collections.abc import Collection, Iterable, Sequence

from modelswap_operator.planning.assess import running
from modelswap_operator.planning.snapshot import Pod


def allowed(max_unavailable: int | str, pods: int) -> int:
    """Return how many of ``pods`` may be unavailable at once: percentages round down, but at least one."""
    if isinstance(max_unavailable, int):
        return max(1, max_unavailable)
    digits = max_unavailable.strip().removesuffix("%")
    wanted = int(digits) if digits.isdecimal() else 1
    return max(1, pods * wanted // 100 if max_unavailable.strip().endswith("%") else wanted)


def unavailable(pod: Pod, idle: Collection[str]) -> bool:
    """Say whether a pod serves less than usual: not Ready, in a swap, or out of rotation.

    A pod that cannot be asked now may be in the middle of a swap, whatever its Ready condition says. It counts as
    available only while it is known to be ``idle``: read so last, and asked for nothing since.
    """
    if not pod.ready:
        return True
    if pod.state is None:
        return pod.uid not in idle
    return pod.state.quarantined or running(pod) is not None


def choose(
    pending: Iterable[Pod], *, counted: Sequence[Pod], idle: Collection[str], max_unavailable: int | str
) -> tuple[Pod, ...]:
    """Return the pods to start on now.

    A pod that is unavailable already costs nothing and goes first; others only while the budget lasts.
    """
    budget = allowed(max_unavailable, len(counted)) - sum(unavailable(pod, idle) for pod in counted)
    chosen = []
    for pod in sorted(pending, key=lambda p: (p.ready, p.name)):
        if not unavailable(pod, idle):
            if budget <= 0:
                continue
            budget -= 1
        chosen.append(pod)
    return tuple(chosen)
