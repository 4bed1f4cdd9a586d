"""How long staging will take, from what was measured in the same slot; never from anything else."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from modelswap_operator.api.modelversion import Revision

_MB = 1_000_000


class Estimate(NamedTuple):
    """Seconds for one pod, and what they were worked out from."""

    seconds: int
    basis: str


def staging(history: Iterable[Revision], *, digest: str, bytes_to_fetch: int) -> Estimate | None:
    """Return what one pod is expected to take to read and stage so many bytes; None where no rate was measured.

    The rate is that of the slowest pod in the newest rollout of another version than ``digest``: a rollout does not
    change what is said of it when it ends.
    """
    measured = (entry for entry in history if entry.staging_bytes_per_second > 0 and entry.digest != digest)
    last = next(measured, None)
    if last is None or bytes_to_fetch <= 0:
        return None
    rate = last.staging_bytes_per_second
    who = f"as the slowest pod did for {last.version} (revision {last.revision})"
    basis = f"{_amount(bytes_to_fetch)} to read at {_amount(rate)}/s, {who}"
    return Estimate(max(1, math.ceil(bytes_to_fetch / rate)), basis)


def _amount(count: int) -> str:
    return f"{count / _MB:.1f} MB" if count >= _MB else f"{count} B"
