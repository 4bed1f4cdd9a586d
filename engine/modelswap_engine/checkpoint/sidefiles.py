"""What a change of side files means for a running engine: ignored, applied with the swap, or refused.

A version is more than tensors. Each difference of meaning between two versions' side files is looked up in the lists
of the backend kind (``siderules.py``); nothing is ever silently ignored. Pure: callers bring the bytes of both.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from modelswap_engine.checkpoint.canonical import (
    CONFIG,
    GENERATION,
    SIDE_FILES,
    TOKENIZER_CONFIG,
    canonical_text,
    meaning,
)
from modelswap_engine.checkpoint.siderules import NO_RULE, RULES, Rules, Verdict
from modelswap_engine.protocol.errors import IncompatibleModel, Refused, UnsupportedChange


class SideChange(msgspec.Struct, frozen=True, kw_only=True):
    """One difference; ``key`` is a dotted path, or "" for a file that is compared as a whole."""

    file: str
    key: str
    verdict: Verdict
    reason: str
    interrupts: bool = False
    model: bool = False


_BY_KEY: Final = frozenset({CONFIG, GENERATION, TOKENIZER_CONFIG})
_ADVICE: Final = "serve this version by a cold restart: set it in the pods' template and restart them"


def compare_side_files(
    live: Mapping[str, bytes], target: Mapping[str, bytes], *, kind: str = "embedded"
) -> tuple[SideChange, ...]:
    """Return every difference of meaning between two versions' side files, with the verdict of a backend kind.

    Args:
        live: name → bytes of the version that is being served.
        target: name → bytes of the wanted one.
        kind: ``Capabilities.kind`` of the engine.

    Raises:
        InvalidCheckpoint: a JSON file is not valid JSON.
    """
    return tuple(
        _judge(name, key, RULES[kind])
        for name in sorted(SIDE_FILES & (live.keys() | target.keys()))
        for key in _changed_keys(name, live.get(name), target.get(name))
    )


def refusals(changes: Iterable[SideChange], *, continues_requests: bool) -> tuple[Refused, ...]:
    """Return why a swap with these changes must be refused; empty when it may go ahead.

    Args:
        changes: what :func:`compare_side_files` found.
        continues_requests: the traffic mode lets requests in flight go on on the new version (Recompute, Freeze).
    """
    found: list[Refused] = []
    for change in changes:
        where = f"{change.file}: {change.key}" if change.key else change.file
        details = {"file": change.file, "key": change.key}
        if change.verdict is Verdict.REFUSED:
            error = IncompatibleModel if change.model else UnsupportedChange
            found.append(error(f"{where} changed: {change.reason}", advice=_ADVICE, details=details))
        elif change.interrupts and continues_requests:
            message = f"{where} changed ({change.reason}): requests in flight cannot continue on it"
            found.append(UnsupportedChange(message, advice="use traffic mode Drain", details=details))
    return tuple(found)


def _changed_keys(name: str, live: bytes | None, target: bytes | None) -> list[str]:
    if live == target:
        return []
    if name in _BY_KEY:
        old = _flat(meaning(name, live) if live is not None else {})
        new = _flat(meaning(name, target) if target is not None else {})
        return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if name.endswith(".json") and live is not None and target is not None:
        return [] if canonical_text(meaning(name, live)) == canonical_text(meaning(name, target)) else [""]
    return [""]


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: canonical_text(value)}
    found: dict[str, str] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return found


def _judge(name: str, key: str, rules: Rules) -> SideChange:
    plain = key.removeprefix("text_config.") if name == CONFIG else key
    rule = next(
        (rule for rule in rules.get(name, ()) if any(fnmatch.fnmatchcase(plain, glob) for glob in rule.keys)),
        NO_RULE,
    )
    return SideChange(
        file=name,
        key=key,
        verdict=rule.verdict,
        reason=rule.reason,
        interrupts=rule.interrupts,
        model=rule.model,
    )
