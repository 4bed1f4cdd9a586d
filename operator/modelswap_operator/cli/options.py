"""Options that several commands of the plugin share, each declared once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from modelswap_operator.api.labels import GROUP, MODELVERSIONS
from modelswap_operator.cli.failures import ClusterError, PluginError
from modelswap_operator.cli.kubectl import Kubectl
from modelswap_operator.cli.slots import Slot, slot_of
from modelswap_operator.cli.views import Output

MODELVERSION: Final = f"{MODELVERSIONS}.{GROUP}"


def slots(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of slots for a shell that completes; nothing where the cluster does not answer."""
    given = context.params
    place = Kubectl(
        namespace=given.get("namespace") or "",
        context=given.get("context") or "",
        kubeconfig=given.get("kubeconfig") or "",
    )
    try:
        names = place.run("get", MODELVERSION, "-o", "name").split()
    except ClusterError:
        return []
    return [name for name in (line.rpartition("/")[2] for line in names) if name.startswith(incomplete)]


Name: TypeAlias = Annotated[
    str, typer.Argument(help="The ModelVersion, which is the slot's name.", autocompletion=slots)
]
Format: TypeAlias = Annotated[Output, typer.Option("-o", "--output", help="text, json or yaml.")]


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which cluster, and which of its namespaces."""

    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Namespace; else your kubeconfig's.")] = ""
    context: Annotated[str, typer.Option("--context", help="Context of your kubeconfig.")] = ""
    kubeconfig: Annotated[str, typer.Option("--kubeconfig", help="Your kubeconfig; else $KUBECONFIG.")] = ""


def slot_named(name: str, where: Where) -> tuple[Kubectl, Slot]:
    """Return the cluster that the options name, and one of its slots.

    Raises:
        ClusterError: there is none of this name, or it cannot be read.
    """
    kubectl = cluster(where)
    return kubectl, slot_of(kubectl.get(MODELVERSION, name))


def cluster(where: Where, *, everywhere: bool = False) -> Kubectl:
    """Return the cluster that the options name."""
    return Kubectl(**vars(where), everywhere=everywhere)


def text_of(file: Path) -> str:
    """Return what is in a file, or on standard input for ``-``.

    Raises:
        PluginError: it cannot be read.
    """
    try:
        return typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
