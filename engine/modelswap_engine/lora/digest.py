"""The content digest of an adapter: what it adds to a base, however it was saved.

    sha256 of canonical JSON ["modelswap.adapter/1", [[name, dtype, shape, sha256], ...], [rank, alpha, ...]]

with tensors sorted by name. Keys of the config that only say how it was trained do not count.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.lora.config import AdapterConfig

_DOMAIN: Final = "modelswap.adapter/1"


def adapter_digest(config: AdapterConfig, tensors: Mapping[str, TensorEntry], hashes: Mapping[str, str]) -> str:
    """Return ``sha256:…`` of an adapter; ``hashes`` are of the bytes of its tensors, by name."""
    listed = [[entry.name, entry.dtype, list(entry.shape), hashes[name]] for name, entry in sorted(tensors.items())]
    text = json.dumps([_DOMAIN, listed, config.canonical()], separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
