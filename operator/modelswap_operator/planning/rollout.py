"""Which pods may be swapped now: ``maxUnavailable`` against what is unavailable already, in waves that double.

Both are counted afresh each time.
"""

from collections.abc import Collection, Iterable, Sequence

from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.snapshot import Pod
from modelswap_operator.planning.staging import swapping


def allowed(max_unavailable: int | str, pods: int) -> int:
    """Return how many of ``pods`` may be unavailable at once: percentages round down, but at least one."""
    if isinstance(max_unavailable, int):
        return max(1, max_unavailable)
    digits = max_unavailable.strip().removesuffix("%")
    wanted = int(digits) if digits.isdecimal() else 1
    return max(1, pods * wanted // 100 if max_unavailable.strip().endswith("%") else wanted)


def unavailable(pod: Pod, idle: Collection[str]) -> bool:
    """Say whether a pod serves less than usual: not Ready, in a swap, or out of rotation. One that stages serves.

    A pod that cannot be asked now may be in the middle of a swap, whatever its Ready condition says. It counts as
    available only while it is known to be ``idle``: read so last, and asked for nothing since.
    """
    if not pod.ready:
        return True
    if pod.state is None:
        return pod.uid not in idle
    return pod.state.quarantined or swapping(pod) is not None


def wave(a: Assessment) -> int | None:
    """Return how many pods may be brought to a new version at once: one more than have proved it.

    That is 1, 2, 4, 8, and so on: what the first pods do not show shows in few of the next ones. None, without such a
    bound, on the way back, and for a version that every pod has served before.
    """
    return None if a.failure is not None or a.completed_before else len(a.on_target) + 1


def choose(
    pending: Iterable[Pod],
    *,
    counted: Sequence[Pod],
    idle: Collection[str],
    max_unavailable: int | str,
    at_once: int | None = None,
) -> tuple[Pod, ...]:
    """Return the pods to start on now.

    A pod that is unavailable already costs nothing and goes first; others only while the budget lasts. ``at_once``
    bounds how many may be in a swap at the same time, whatever the budget says.
    """
    budget = allowed(max_unavailable, len(counted)) - sum(unavailable(pod, idle) for pod in counted)
    places = len(counted) if at_once is None else at_once - sum(swapping(pod) is not None for pod in counted)
    chosen: list[Pod] = []
    for pod in sorted(pending, key=lambda p: (p.ready, p.name)):
        if len(chosen) >= places:
            break
        if not unavailable(pod, idle):
            if budget <= 0:
                continue
            budget -= 1
        chosen.append(pod)
    return tuple(chosen)
