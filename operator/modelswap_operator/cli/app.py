"""The command ``kubectl modelswap`` (``kubectl-modelswap`` on the PATH)."""

import sys
from typing import Annotated

import typer

from modelswap_engine import __version__
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_operator.cli import asking, changing, doctor, looking
from modelswap_operator.cli.failures import Exit, PluginError

app = typer.Typer(
    name="kubectl modelswap",
    help="Look at slots, find out what is wrong, and go back. Exit codes: 1 failed or stalled, 2 wrong usage, "
    "3 timed out, 4 the cluster refused.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kubectl-modelswap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


for _module in (looking, doctor, asking, changing):
    _module.register(app)


def main() -> None:
    """Run the command line; errors are two lines for a person, never a traceback."""
    try:
        app()
    except PluginError as error:
        _report(error.message, error.advice)
        sys.exit(error.code)
    except ModelswapError as error:
        _report(f"{error.code}: {error.message}", error.advice)
        sys.exit(Exit.FAILED)
    except BrokenPipeError:  # `kubectl modelswap status | head`
        sys.stderr.close()
        sys.exit(Exit.FAILED)


def _report(message: str, advice: str) -> None:
    typer.echo(f"error: {message}", err=True)
    if advice:
        typer.echo(f"next: {advice}", err=True)
