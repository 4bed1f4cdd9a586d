"""Writes the table of values in each chart's README.md from the comments of its values.yaml.

A comment line that begins with "# -- " describes the key on the next line. A leaf key without one is an error: what
a user can set must say what it does. This script knows the two-space block style of our values files and no other.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- values: generated from values.yaml by hack/gen_chart_readme.py -->\n"
END = "<!-- end of values -->\n"
KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):")


class BadValues(Exception):
    """A values file or README does not have the form that this script needs."""


@dataclass(frozen=True)
class Row:
    """One documented value."""

    path: str
    default: str
    text: str


def described(text: str) -> dict[str, str]:
    """Return the description of every key that has one, by dotted path."""
    found: dict[str, str] = {}
    stack: list[str] = []
    pending = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            pending = stripped.removeprefix("# -- ")
        elif match := KEY.match(line):
            del stack[len(match["indent"]) // 2 :]
            stack.append(match["key"])
            if pending:
                found[".".join(stack)] = pending
            pending = ""
    return found


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and default of every leaf; an empty map is a leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def rows(name: str, text: str) -> list[Row]:
    """Return the table's rows in the file's order; a described map is one row."""
    texts = described(text)
    values = yaml.safe_load(text)
    found: dict[str, Row] = {}
    for path, default in leaves(values):
        parts = path.split(".")
        owner = next((".".join(parts[:n]) for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in texts), None)
        if owner is None:
            raise BadValues(f"{name}: {path} has no '# -- ' comment")
        whole = default
        if owner != path:
            whole = values
            for part in owner.split("."):
                whole = whole[part]
        found.setdefault(owner, Row(owner, json.dumps(whole), texts[owner]))
    return list(found.values())


def table(name: str, text: str) -> str:
    """Return the Markdown table of one values file."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    lines += [f"| `{row.path}` | `{row.default}` | {row.text} |" for row in rows(name, text)]
    return "\n".join(lines) + "\n"


def updated(readme: Path) -> str:
    """Return the README with its table up to date."""
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise BadValues(f"{readme}: needs the lines {BEGIN.strip()!r} and {END.strip()!r} once each")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    values = readme.parent / "values.yaml"
    return f"{head}{BEGIN}{table(str(values), values.read_text())}{END}{tail}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or with --check only say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a table is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the source tree (default: this one)")
    options = parser.parse_args(arguments)
    status = 0
    for readme in sorted((options.root / "charts").glob("*/README.md")):
        try:
            wanted = updated(readme)
        except BadValues as error:
            print(f"gen_chart_readme: {error}", file=sys.stderr)
            return 1
        if wanted == readme.read_text():
            continue
        if options.check:
            print(f"{readme.relative_to(options.root)} is stale: run python hack/gen_chart_readme.py", file=sys.stderr)
            status = 1
        else:
            readme.write_text(wanted)
    return status


if __name__ == "__main__":
    sys.exit(main())
