"""What torch and numpy call dtypes, and what safetensors does."""

from typing import Final

from modelswap_engine.protocol.errors import BadRequest

_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float": "F32",
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def safetensors_dtype(name: str) -> str:
    """Return safetensors' name of a dtype that may be written as torch or numpy writes it.

    Raises:
        BadRequest: no such dtype.
    """
    plain = name.removeprefix("torch.")
    found = _NAMES.get(plain, plain)
    if found not in _NAMES.values():
        raise BadRequest(f"unknown dtype {name[:80]!r}", advice=f"use one of: {', '.join(sorted(_NAMES))}")
    return found
