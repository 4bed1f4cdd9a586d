"""Names of operations: a function of (owner, revision, pod, boot, attempt), so that a repeated call is the same call.

The boot id is part of it because a restarted sidecar has forgotten what an earlier operation made live.
"""

import hashlib
import re

from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import SwapStatus

_FORM = re.compile(r"r(\d+)-a(\d+)-([0-9a-f]{16})")


def _key(owner_uid: str, pod_uid: str, boot_id: str) -> str:
    return hashlib.sha256(f"{owner_uid}\0{pod_uid}\0{boot_id}".encode()).hexdigest()[:16]


def operation_id(*, owner_uid: str, revision: int, pod_uid: str, state: EngineState) -> str:
    """Name the next attempt to swap a pod at a revision: one after the last that ended, else the first."""
    key = _key(owner_uid, pod_uid, state.boot_id)
    attempt = 0
    last = state.operation
    if last is not None and (found := _FORM.fullmatch(last.operation_id)):
        same = (int(found[1]), found[3]) == (revision, key)
        attempt = int(found[2]) + (1 if last.state.terminal else 0) if same else 0
    return f"r{revision}-a{attempt}-{key}"


def covers(noted: str, ended: str) -> bool:
    """Say whether an attempt that was noted is the one that ended, or a later one of the same row."""
    one, other = _FORM.fullmatch(noted), _FORM.fullmatch(ended)
    if one is None or other is None:
        return noted == ended
    return (one[1], one[3]) == (other[1], other[3]) and int(one[2]) >= int(other[2])


def attempt_number(operation: SwapStatus | None) -> int:
    """Return which attempt an operation is, from 1; 0 for operations of others."""
    found = _FORM.fullmatch(operation.operation_id) if operation is not None else None
    return int(found[2]) + 1 if found else 0
