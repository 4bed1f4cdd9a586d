"""Renders crds/*.yaml as templates of charts/modelswap, so that Helm can upgrade and keep them.

Helm installs a chart's own crds/ folder once and never again; templates are upgraded. The YAML in crds/ stays the
source of truth. This script knows nothing about the content of a CRD beyond where its metadata stands.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("crds")
TARGET = Path("charts/modelswap/templates/crds")

HEAD = "{{/* Generated from %s by hack/gen_chart_crds.py. Do not edit. */}}\n{{- if .Values.crds.enabled }}\n"
METADATA = """\
  labels:
    {{- include "modelswap.labels" . | nindent 4 }}
  {{- if .Values.crds.keep }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
"""
TAIL = "{{- end }}\n"


class BadCRD(Exception):
    """A file in crds/ does not have the form that this script can wrap."""


def render(name: str, text: str) -> str:
    """Return the chart template for one CRD file."""
    if "{{" in text or "}}" in text:
        raise BadCRD(f"{name}: contains '{{{{' or '}}}}', which Helm would read as a template; reword it")
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    try:
        metadata = lines.index("metadata:\n")
    except ValueError:
        raise BadCRD(f"{name}: has no line 'metadata:'; write the CRD in block style") from None
    if not lines[metadata + 1].startswith("  name: ") or lines[metadata + 2].startswith(" "):
        raise BadCRD(f"{name}: metadata must hold the name only; the chart adds labels and annotations")
    lines.insert(metadata + 2, METADATA)
    return HEAD % f"{SOURCE}/{name}" + "".join(lines) + TAIL


def expected(root: Path) -> dict[Path, str]:
    """Return every file that the target folder must hold, with its content."""
    sources = sorted((root / SOURCE).glob("modelswap.dev_*.yaml"))
    return {root / TARGET / path.name: render(path.name, path.read_text()) for path in sources}


def stale(root: Path) -> list[Path]:
    """Return the files of the target folder that differ from what they must be, missing and superfluous ones too."""
    wanted = expected(root)
    present = {path: path.read_text() for path in (root / TARGET).glob("*.yaml")}
    return sorted(path for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))


def write(root: Path) -> None:
    """Bring the target folder up to date."""
    wanted = expected(root)
    (root / TARGET).mkdir(parents=True, exist_ok=True)
    for path in stale(root):
        if path in wanted:
            path.write_text(wanted[path])
        else:
            path.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the templates, or with --check only say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a file is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the source tree (default: this one)")
    options = parser.parse_args(arguments)
    try:
        if not options.check:
            write(options.root)
            return 0
        files = stale(options.root)
    except BadCRD as error:
        print(f"gen_chart_crds: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(f"{path.relative_to(options.root)} is stale: run python hack/gen_chart_crds.py", file=sys.stderr)
    return 1 if files else 0


if __name__ == "__main__":
    sys.exit(main())
