"""What the plugin shows: trees, tables and lines. Pure but for the console; every figure has its unit."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from modelswap_engine.cli.render import seconds, size
from modelswap_operator.api.conditions import find
from modelswap_operator.api.reasons import ConditionType
from modelswap_operator.api.times import parse
from modelswap_operator.cli.slots import Slot

_COLOURS = {"Serving": "green", "Quarantined": "red", "Refused": "red", "Unreachable": "red", "NotReady": "yellow"}


_WIDEST = 1000


class Output(StrEnum):
    """How results are shown."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


def show(renderable: RenderableType) -> None:
    """Write to standard output, in colours only on a terminal whose user wants them."""
    console().print(renderable)


def console() -> Console:
    """Return standard output."""
    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    # As kubectl does: a row is one line, however narrow the terminal.
    return Console(highlight=False, soft_wrap=True, no_color=plain, width=_WIDEST)


def data(value: object, output: Output) -> None:
    """Write a value as JSON or YAML."""
    if output is Output.JSON:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        return
    sys.stdout.write(as_yaml(value))


def as_yaml(value: object) -> str:
    """Return a value as YAML."""
    import yaml

    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
    return text


def short(digest: str) -> str:
    """Return enough of a digest to tell it from others."""
    return digest[:19] if digest else "-"


def tree(slot: Slot, adapters: Sequence[dict[str, Any]]) -> Tree:
    """Show a slot, its pods and its adapters."""
    status = slot.status
    word, style = _verdict(slot)
    root = Tree(Text.assemble((f"{slot.namespace}/{slot.name}", "bold"), "  ", (word, style), "  ", slot.message))
    root.add(_versions(slot))
    pods = root.add(Text(_counts(slot), style="bold")) if status.pods else None
    for pod in status.pods if pods is not None else ():
        line = Text.assemble(pod.name, "  ", (pod.state or "-", _COLOURS.get(pod.state, "cyan")))
        line.append(f"  {pod.version or '-'}  {short(pod.digest)}")
        if pod.message:
            line.append(f"  {pod.message}")
        if pods is not None:
            pods.add(line)
    counts = status.pod_counts
    listed = len(status.pods)
    if pods is not None and counts is not None and counts.total > listed:
        pods.add(Text(f"… and {counts.total - listed} more"))
    if adapters:
        branch = root.add(Text("adapters", style="bold"))
        for adapter in adapters:
            branch.add(adapter_line(adapter))
    return root


def _counts(slot: Slot) -> str:
    counts = slot.status.pod_counts
    if counts is None:
        return "pods"
    excluded = f", {counts.excluded} not counted (starting, or on their way out)" if counts.excluded else ""
    return f"pods: {counts.ready} of {counts.counted} serve {slot.spec.version}{excluded}"


def _verdict(slot: Slot) -> tuple[str, str]:
    stalled = slot.stalled
    if stalled is not None:
        return f"Stalled: {stalled.reason}", "red"
    if slot.ready:
        return "Ready", "green"
    if slot.spec.suspend:
        return "Suspended", "yellow"
    ready = slot.condition(ConditionType.READY)
    return (ready.reason if ready is not None else "Unknown"), "yellow"


def _versions(slot: Slot) -> Text:
    status, spec = slot.status, slot.spec
    line = f"wanted {spec.version} from {spec.source.uri}"
    if status.target is not None and status.target.digest:
        line += f" ({short(status.target.digest)})"
    if status.stable is not None:
        line += f"; stable {status.stable.version} ({short(status.stable.digest)})"
    if status.rollout is not None and status.rollout.state:
        line += f"; rollout {status.rollout.state}"
        line += f", {status.rollout.staged_pods} pods have staged it" if status.rollout.staged_pods else ""
    if slot.managed_by:
        line += f"; written by {slot.managed_by}"
    return Text(line)


def adapter_line(adapter: dict[str, Any]) -> Text:
    """Show a LoRAAdapter in one line."""
    spec, conditions = adapter.get("spec", {}), adapter.get("status", {}).get("conditions", [])
    ready = next((c for c in conditions if c.get("type") == ConditionType.READY), None)
    name = spec.get("adapterName") or adapter["metadata"]["name"]
    if ready is None:
        return Text(f"{name}  no operator has seen it yet")
    good = ready.get("status") == "True"
    word = ("Ready", "green") if good else (ready.get("reason", "-"), "yellow")
    return Text.assemble(f"{name}  ", word, f"  {ready.get('message', '')}")


def line(slot: Slot, started: datetime, now: datetime) -> str:
    """Return one line of progress, with the seconds since the beginning."""
    ready = find(slot.status.conditions, ConditionType.READY)
    word = ready.status if ready is not None and slot.condition(ConditionType.READY) is not None else "Unknown"
    return f"{(now - started).total_seconds():7.1f} s  Ready={word}  {slot.message}"


def history(slot: Slot) -> RenderableType:
    """Show the finished revisions, newest first."""
    if not slot.status.history:
        return Text(f"modelversion {slot.name}: no rollout has ended yet")
    columns = ("revision", "version", "digest", "result", "ended", "took", "commit window", "fetched", "by", "source")
    table = _table(columns)
    for entry in slot.status.history:
        window = entry.commit_window_microseconds
        table.add_row(
            str(entry.revision),
            entry.version,
            short(entry.digest),
            entry.result,
            entry.completion_time or "-",
            _took(entry.start_time, entry.completion_time),
            seconds(window / 1e6) if window else "-",
            size(entry.bytes_fetched) if entry.bytes_fetched else "-",
            entry.field_manager or "-",
            entry.source,
        )
    return table


def _took(start: str, end: str) -> str:
    first, last = parse(start), parse(end)
    if first is None or last is None or last < first:
        return "-"
    return f"{(last - first).total_seconds():.0f} s"


def rows(columns: Sequence[str], found: Iterable[Sequence[str]]) -> Table:
    """Show rows under a heading."""
    table = _table(columns)
    for row in found:
        table.add_row(*row)
    return table


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
