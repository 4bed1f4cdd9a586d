"""Side files: which files of a folder count, and the form in which they count for the content digest.

Saving the same model twice must give the same digest, so JSON is compared by meaning (key order, whitespace, ``1.0``
and ``1``) and without the keys that record the circumstances of a save. That list is short on purpose: a key that can
change an answer is never on it. Pure: callers bring the bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from modelswap_engine.checkpoint import strict_json
from modelswap_engine.checkpoint.manifest import SideFile
from modelswap_engine.checkpoint.rules import refuse

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"

SIDE_FILES: Final = frozenset(
    {
        CONFIG, GENERATION, TOKENIZER_CONFIG,
        "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
        "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
        "chat_template.jinja", "chat_template.json",
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    }
)  # fmt: skip
"""Files that belong to a version. Everything else in a folder (README, code, optimizer state, other formats' weights)
is neither read, nor copied, nor part of the digest."""

MAX_SIDE_FILE_BYTES: Final = 128 << 20

_EVERY_SAVE: Final = frozenset({"transformers_version", "_name_or_path", "_commit_hash"})
VOLATILE_KEYS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        CONFIG: _EVERY_SAVE,
        GENERATION: _EVERY_SAVE | {"_from_model_config", "_original_object_hash"},
        TOKENIZER_CONFIG: _EVERY_SAVE
        | {"name_or_path", "special_tokens_map_file", "tokenizer_file", "is_local", "local_files_only"},
    }
)
"""Keys without meaning for what a model answers, by file. In ``config.json`` also inside nested configurations."""

_OLD_DTYPE, _DTYPE = "torch_dtype", "dtype"  # transformers 5 renamed the key; both mean the same


def meaning(name: str, data: bytes) -> Any:
    """Return a JSON side file as the value that counts: volatile keys dropped, renamed keys unified.

    Raises:
        InvalidCheckpoint: not JSON, or duplicate keys.
    """
    value = strict_json.loads(data, file=name, constants=True)
    if name == CONFIG and not isinstance(value, dict):
        refuse("it is not a JSON object", file=name)
    volatile = VOLATILE_KEYS.get(name, frozenset())
    if name == CONFIG:
        return _config(value, volatile)
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if key not in volatile}
    return _numbers(value)


def canonical_text(value: Any) -> str:
    """Return the one text of a JSON value; unlike ``==`` it tells ``true`` from ``1``."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def side_file(name: str, data: bytes) -> SideFile:
    """Return the manifest entry of a side file.

    Raises:
        InvalidCheckpoint: a JSON file that is not valid JSON.
    """
    raw = hashlib.sha256(data).hexdigest()
    canonical = raw
    if name.endswith(".json"):
        canonical = hashlib.sha256(canonical_text(meaning(name, data)).encode("ascii")).hexdigest()
    return SideFile(name=name, size=len(data), sha256=raw, canonical_sha256=canonical)


def architecture_of(side_files: Mapping[str, bytes]) -> str:
    """Return the first of ``architectures`` in ``config.json``, else its ``model_type``, else "".

    Raises:
        InvalidCheckpoint: ``config.json`` is not a JSON object.
    """
    data = side_files.get(CONFIG)
    if data is None:
        return ""
    config = meaning(CONFIG, data)
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else config.get("model_type")
    return first if isinstance(first, str) else ""


def _config(value: Any, volatile: frozenset[str]) -> Any:
    if isinstance(value, dict):
        kept = {key: _config(item, volatile) for key, item in value.items() if key not in volatile}
        if _OLD_DTYPE in kept and kept.get(_DTYPE, kept[_OLD_DTYPE]) == kept[_OLD_DTYPE]:
            kept[_DTYPE] = kept.pop(_OLD_DTYPE)
        return kept
    return [_config(item, volatile) for item in value] if isinstance(value, list) else _number(value)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else _number(value)


def _number(value: Any) -> Any:
    # JSON has one kind of number; beyond 2^53 a float no longer says which integer was meant.
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value
