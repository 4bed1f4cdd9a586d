"""``kubectl modelswap rollback``: the way back, for Git by default, into the cluster when asked."""

import json
from typing import Annotated

import typer

from modelswap_engine.cli.groups import grouped
from modelswap_operator.cli import views
from modelswap_operator.cli.failures import PluginError
from modelswap_operator.cli.looking import follow
from modelswap_operator.cli.options import MODELVERSION, Name, Where, slot_named
from modelswap_operator.cli.slots import change_to, patch_to, revision_to_return_to

FIELD_MANAGER = "modelswap-cli"
"""Not ``kubectl-…``: Flux takes back what managers of that prefix wrote."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(grouped(rollback))


def rollback(
    *,
    name: Name,
    to_revision: Annotated[
        int | None, typer.Option(min=0, help="Revision of `history`; else the last good one that is not wanted now.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write it to the cluster instead of printing it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where Flux, Argo CD or Helm writes the object.")] = False,
    wait: Annotated[bool, typer.Option(help="With --apply: follow until it is Ready.")] = True,
    where: Where,
) -> None:
    """Print the change that leads back to an earlier version; with --apply make it."""
    kubectl, slot = slot_named(name, where)
    revision = revision_to_return_to(slot, to_revision)
    typer.echo(
        f"# {slot.namespace}/{name}: from {slot.spec.version} back to {revision.version}, "
        f"revision {revision.revision}, {revision.digest or 'no digest known'}",
        err=apply,
    )
    if not apply:
        elsewhere = (
            f"This object is written by {slot.managed_by}: change it where that reads it." if slot.managed_by else ""
        )
        typer.echo(views.as_yaml(patch_to(revision)), nl=False)
        typer.echo(f"# {elsewhere or f'kubectl modelswap rollback {name} --apply makes this change in the cluster.'}")
        return
    if slot.managed_by and not force:
        raise PluginError(
            f"modelversion {name} is written by {slot.managed_by}, which would undo this",
            advice="make the change where that reads it, or use --force and stop the reconciliation first",
        )
    body = json.dumps(change_to(revision, slot))
    done = kubectl.run("patch", MODELVERSION, name, "--type=json", f"--field-manager={FIELD_MANAGER}", "-p", body)
    typer.echo(done.strip())
    if wait:
        stalled = follow(kubectl, name, seconds=None).stalled
        if stalled is not None:
            raise PluginError(f"modelversion {name} is Stalled, {stalled.reason}: {stalled.message}")
