"""The command ``modelswap``.

Modules that do the work are imported when their command runs, so that ``modelswap --help`` and ``modelswap
manifest build`` need neither torch nor an HTTP library. Errors are two lines for a person, never a traceback:
exit code 1 for what failed, 2 for wrong usage.
"""

import sys
from typing import Annotated

import typer

from modelswap_engine import __version__
from modelswap_engine.cli import adapters, diff, launch, manifest, operations, proxying, serving
from modelswap_engine.protocol.errors import ModelswapError

app = typer.Typer(
    name="modelswap",
    help="Change the weights of a running inference engine: no restart, no dropped requests.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"modelswap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


for _module in (serving, proxying, operations, adapters, manifest, diff, launch):
    _module.register(app)


def report(error: ModelswapError) -> None:
    """Show an error to a person, on standard error."""
    typer.echo(f"error: {error.message}", err=True)
    if error.advice:
        typer.echo(f"next: {error.advice}", err=True)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ModelswapError as error:
        report(error)
        sys.exit(1)
    except BrokenPipeError:  # `modelswap state | head`
        sys.stderr.close()
        sys.exit(1)
