"""What matters of what kubectl prints, as lines for a terminal. Pure; the words are kubectl's own."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

WIDTH = 112
_SHOWN_CONDITIONS = ("Stalled", "Serving")
_LEFT_OUT = ("Last Transition Time:", "Observed Generation:")


def without_age(line: str) -> str:
    """Return a line of `kubectl get` without its last column, which changes by itself."""
    return line.rstrip().rsplit(maxsplit=1)[0] if line.strip() else ""


def refusal_excerpt(description: str, *, version: str) -> Iterator[str]:
    """Yield why a version was refused and what is served, out of what `kubectl describe` prints.

    The conditions Stalled and Serving without their times, and the version's newest warning.
    """
    status, _, events = description.partition("\nEvents:")
    yield "…"
    yield "Conditions:"
    for condition in _conditions(status):
        if any(line.split() in (["Type:", kind] for kind in _SHOWN_CONDITIONS) for line in condition):
            for line in condition:
                yield from _folded(line, column=_value_column(line))
    yield "…"
    yield "Events:"
    head, *rows = [line for line in events.splitlines() if line.strip()] or [""]
    column = head.find("Message")
    warnings = [row for row in rows if row.strip().startswith("Warning") and version in row]
    if column >= 0 and warnings:
        yield head
        yield from _folded(warnings[-1], column=column)


def _conditions(status: str) -> Iterator[list[str]]:
    """Yield the lines of each condition; kubectl sorts fields by name: the time comes first, the type last."""
    block: list[str] = []
    for line in status.partition("Conditions:")[2].splitlines():
        if line.strip().startswith("Last Transition Time:"):
            block = []
        elif line.strip() and not line.strip().startswith(_LEFT_OUT):
            block.append(line)
        if line.strip().startswith("Type:"):
            yield block
            block = []


def _value_column(line: str) -> int:
    """Return where the value of ``name:  value`` begins."""
    after = line.index(":") + 1 if ":" in line else 0
    return after + len(line[after:]) - len(line[after:].lstrip())


def _folded(line: str, *, column: int) -> list[str]:
    """Fold a long line, with what follows under the column where its text begins."""
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=" " * column,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )
