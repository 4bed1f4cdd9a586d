"""Names of operations: a function of (owner, revision, pod, boot, attempt), so that a repeated call is the same call.

The boot id is part of it because a restarted sidecar has forgotten what an earlier operation made live. Where somebody
else's operation came after ours, the state it left is part of the name too: a name that the pod knows would only be
answered with what became of it then.
"""

import hashlib
import re

from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import SwapStatus

_FORM = re.compile(r"r(?P<row>\d+(?:s\d+)?)-a(?P<attempt>\d+)-(?P<key>[0-9a-f]{16})")


def _key(owner_uid: str, pod_uid: str, boot_id: str) -> str:
    return hashlib.sha256(f"{owner_uid}\0{pod_uid}\0{boot_id}".encode()).hexdigest()[:16]


def operation_id(*, owner_uid: str, revision: int, pod_uid: str, state: EngineState) -> str:
    """Name the next attempt to swap a pod at a revision: one after the last that ended, else the first."""
    key = _key(owner_uid, pod_uid, state.boot_id)
    row, attempt = str(revision), 0
    last = state.operation
    found = _FORM.fullmatch(last.operation_id) if last is not None else None
    if found is not None and (found["row"].partition("s")[0], found["key"]) == (row, key) and last is not None:
        row, attempt = found["row"], int(found["attempt"]) + (1 if last.state.terminal else 0)
    elif last is not None and found is None:
        row = f"{revision}s{state.seq}"
    return f"r{row}-a{attempt}-{key}"


def covers(noted: str, ended: str) -> bool:
    """Say whether an attempt that was noted is the one that ended, or a later one of the same row."""
    one, other = _FORM.fullmatch(noted), _FORM.fullmatch(ended)
    if one is None or other is None:
        return noted == ended
    return (one["row"], one["key"]) == (other["row"], other["key"]) and int(one["attempt"]) >= int(other["attempt"])


def attempt_number(operation: SwapStatus | None) -> int:
    """Return which attempt an operation is, from 1; 0 for operations of others."""
    found = _FORM.fullmatch(operation.operation_id) if operation is not None else None
    return int(found["attempt"]) + 1 if found else 0
