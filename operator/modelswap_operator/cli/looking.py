"""``kubectl modelswap status|wait|history``: how slots stand, and how they came there."""

import time
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer
from rich.console import Group

from modelswap_engine.cli.groups import grouped
from modelswap_operator.api.labels import GROUP, LORAADAPTERS
from modelswap_operator.cli import views
from modelswap_operator.cli.failures import PluginError, TimedOutError, UsageError
from modelswap_operator.cli.kubectl import Kubectl
from modelswap_operator.cli.options import (
    MODELVERSION,
    Format,
    Name,
    Where,
    cluster,
    slot_named,
    slots,
)
from modelswap_operator.cli.slots import Slot, adapters_of, slot_of
from modelswap_operator.cli.views import Output

LORAADAPTER = f"{LORAADAPTERS}.{GROUP}"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, wait, history):
        app.command()(grouped(command))


def status(
    *,
    name: Annotated[
        str, typer.Argument(help="The ModelVersion; all of them when left out.", autocompletion=slots)
    ] = "",
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Follow one slot until it is Ready or Stalled.")] = False,
    all_namespaces: Annotated[bool, typer.Option("-A", "--all-namespaces", help="In every namespace.")] = False,
    where: Where,
    output: Format = Output.TEXT,
) -> None:
    """Show slots, their pods and their adapters."""
    if all_namespaces and name:
        raise UsageError("a name and -A do not go together", advice="name its namespace with -n")
    kubectl = cluster(where, everywhere=all_namespaces)
    if watch:
        if not name:
            raise UsageError("--watch follows one slot", advice="name it")
        follow(kubectl, name, seconds=None)
    things = [kubectl.get(MODELVERSION, name)] if name else kubectl.items(MODELVERSION)
    adapters = kubectl.items(LORAADAPTER)
    if output is not Output.TEXT:
        mine = [adapters_of(adapters, thing["metadata"]) for thing in things]
        found = [{"modelVersion": thing, "adapters": own} for thing, own in zip(things, mine, strict=True)]
        views.data(found[0] if name else found, output)
        return
    if not things:
        place = "any namespace" if all_namespaces else where.namespace or "this namespace"
        typer.echo(f"no ModelVersions in {place}", err=True)
        return
    views.show(Group(*(views.tree(slot_of(thing), adapters_of(adapters, thing["metadata"])) for thing in things)))


def wait(
    *,
    name: Name,
    timeout: Annotated[float, typer.Option(min=1, help="Give up after so many seconds; exit code 3.")] = 900.0,
    where: Where,
) -> None:
    """Wait until every pod serves what the object says; exit code 1 when it is Stalled, 3 when time is up."""
    kubectl = cluster(where)
    slot = follow(kubectl, name, seconds=timeout)
    stalled = slot.stalled
    if stalled is not None:
        raise PluginError(
            f"modelversion {name} is Stalled, {stalled.reason}: {stalled.message}",
            advice=f"kubectl modelswap doctor {name}",
        )


def follow(kubectl: Kubectl, name: str, *, seconds: float | None) -> Slot:
    """Print how a slot comes on, each line once, until it is Ready or Stalled at its newest generation.

    Raises:
        TimedOutError: it is neither in time.
    """
    started, said, slot = datetime.now(UTC), "", None
    ends = time.monotonic() + seconds if seconds is not None else None
    while ends is None or time.monotonic() < ends:
        left = None if ends is None else ends - time.monotonic()
        for thing in kubectl.watch(MODELVERSION, name, seconds=left):
            slot = slot_of(thing)
            line = views.line(slot, started, datetime.now(UTC))
            if line[10:] != said:  # without the seconds
                typer.echo(line)
                said = line[10:]
            if slot.ready or slot.stalled is not None:
                return slot
        # The API server ends a watch now and then.
    message = f": {slot.message}" if slot is not None else ""
    raise TimedOutError(
        f"modelversion {name} is not Ready after {seconds:g} s{message}", advice=f"kubectl modelswap doctor {name}"
    )


def history(
    *,
    name: Name,
    where: Where,
    output: Format = Output.TEXT,
) -> None:
    """Show the versions that a slot was told to serve, newest first, with the figures of each rollout."""
    _, slot = slot_named(name, where)
    if output is not Output.TEXT:
        views.data(msgspec.to_builtins(slot.status.history), output)
        return
    views.show(views.history(slot))
