"""Options that several commands of the plugin share, each declared once."""

from typing import Annotated, TypeAlias

import typer

from modelswap_operator.cli.kubectl import Kubectl
from modelswap_operator.cli.views import Output

Name: TypeAlias = Annotated[str, typer.Argument(help="The ModelVersion, which is the slot's name.")]
Namespace: TypeAlias = Annotated[str, typer.Option("-n", "--namespace", help="Namespace; else your kubeconfig's.")]
Context: TypeAlias = Annotated[str, typer.Option("--context", help="Context of your kubeconfig.")]
Kubeconfig: TypeAlias = Annotated[str, typer.Option("--kubeconfig", help="Your kubeconfig; else $KUBECONFIG.")]
Format: TypeAlias = Annotated[Output, typer.Option("-o", "--output", help="text, json or yaml.")]


def cluster(*, namespace: str, context: str, kubeconfig: str, everywhere: bool = False) -> Kubectl:
    """Return the cluster that the options name."""
    return Kubectl(namespace=namespace, context=context, kubeconfig=kubeconfig, everywhere=everywhere)
