"""JSON of strangers: one meaning per text, bounded work.

Python's reader keeps the last of duplicate keys and takes ``NaN``; two readers that disagree about a header are how a
file passes the check of one and is loaded by another. Knows no file format.
"""

import json
from typing import Any, Final

from modelswap_engine.checkpoint.rules import refuse, shown

MAX_ITEMS: Final = 8_000_000
"""Brackets and commas a text may hold; bounds the memory that parsing can take before its form is known."""


def loads(data: bytes, *, file: str, constants: bool = False) -> Any:
    """Parse UTF-8 JSON.

    Args:
        data: the text.
        file: name for messages.
        constants: accept ``NaN`` and ``Infinity``, which some model configurations contain.

    Raises:
        InvalidCheckpoint: not UTF-8, not JSON, a duplicate key, too deep or too many items.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_ITEMS:
        refuse(f"more than {MAX_ITEMS} JSON items", file=file)

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            refuse(f"duplicate key {shown(_first_duplicate(pairs))!r}", file=file)
        return found

    def constant(text: str) -> float:
        if not constants:
            refuse(f"{text} is not JSON", file=file)
        return float(text)

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=constant)
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 at byte {error.start}", file=file)
    except RecursionError:
        refuse("JSON nested too deeply", file=file)
    except ValueError as error:  # JSONDecodeError, or a number with thousands of digits
        refuse(f"not valid JSON: {error}", file=file)


def _first_duplicate(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return ""
