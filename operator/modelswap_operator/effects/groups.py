"""Pods that hold one model together, or serve one request together, with others: they are refused, not changed singly.

Read from what schedulers of groups write on their pods, and from the flags of the engines themselves. What is not
known here is taken for a pod of its own.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

Json = dict[str, Any]

LWS_NAME: Final = "leaderworkerset.sigs.k8s.io/name"
LWS_SIZE: Final = "leaderworkerset.sigs.k8s.io/size"
RAY_CLUSTER: Final = "ray.io/cluster"
LLMD_ROLE: Final = "llm-d.ai/role"

_ROLES: Final = frozenset({"prefill", "decode"})
_REPLICAS: Final = frozenset({"--data-parallel-size", "-dp", "--dp-size", "--dp"})
_TRANSFER: Final = "-transfer-config"
_ONE_SIDED: Final = ("kv_producer", "kv_consumer")


def group_of(pod: Json) -> str:
    """Return what makes a pod one of a group; empty when nothing does."""
    metadata = pod.get("metadata") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return _scheduled(labels, annotations) or next(_flagged(pod.get("spec") or {}), "")


def _scheduled(labels: dict[str, str], annotations: dict[str, str]) -> str:
    if LWS_NAME in labels and annotations.get(LWS_SIZE, "") != "1":
        return f"LeaderWorkerSet {labels[LWS_NAME]}"
    if RAY_CLUSTER in labels:
        return f"Ray cluster {labels[RAY_CLUSTER]}"
    if labels.get(LLMD_ROLE) in _ROLES:
        return f"the {labels[LLMD_ROLE]} half of a prefill/decode pair"
    return ""


def _flagged(spec: Json) -> Iterator[str]:
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        words = [str(word) for word in (*(container.get("command") or []), *(container.get("args") or []))]
        yield from _one_sided(" ".join(words))
        for flag, value in _flags(words):
            if flag == "--nnodes" and _number(value) > 1:
                yield f"{flag} {value}: one model on several nodes"
            elif flag in _REPLICAS and _number(value) > 1:
                yield f"{flag} {value}: data parallelism of the engine's own"
            elif flag == "--disaggregation-mode" and value in _ROLES:
                yield f"{flag} {value}: the {value} half of a prefill/decode pair"


def _one_sided(line: str) -> Iterator[str]:
    """Look for a side in all that follows the flag: its value is JSON, which people write with spaces or without."""
    _, flag, rest = line.replace("_transfer_", "-transfer-").partition(_TRANSFER)
    if flag and any(side in rest for side in _ONE_SIDED):
        yield "--kv-transfer-config: one half of a prefill/decode pair"


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Return flags with their values, written in one word or in two; a shell's line is read word by word."""
    split = [part for word in words for part in word.split()]
    for word, after in pairwise([*split, ""]):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            yield flag.replace("_", "-"), value if equals else after


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
