"""What every command line of modelswap is: a typer application whose errors are two lines, never a traceback."""

from typing import Annotated

import typer

from modelswap_engine import __version__


def program(name: str, *, about: str) -> typer.Typer:
    """Return an application without commands, which knows ``--help`` and ``--version``."""
    app = typer.Typer(
        name=name,
        help=about,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def say_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{name} {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=say_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        del version

    return app


def report(message: str, advice: str = "") -> None:
    """Show an error to a person, on standard error: the cause, and the next step where one is known."""
    typer.echo(f"error: {message}", err=True)
    if advice:
        typer.echo(f"next: {advice}", err=True)
