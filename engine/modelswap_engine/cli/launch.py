"""``modelswap launch`` and ``modelswap engine-files``: our side of an engine's own container.

An engine's image has nothing of ours. ``engine-files`` copies this package (Python alone, no dependencies) to a volume
that both containers see, and there ``python3 -m modelswap_engine.backends.launch`` starts the engine. ``modelswap
launch`` is the same for an image in which modelswap is installed.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

import modelswap_engine
from modelswap_engine.protocol.errors import BadRequest


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(launch)
    app.command("engine-files")(engine_files)


def launch(context: typer.Context) -> None:
    """Start an engine behind a sidecar, on the version that it assigns: modelswap launch --engine vllm -- COMMAND."""
    from modelswap_engine.backends.launch import main

    raise typer.Exit(main(context.args))


def engine_files(
    directory: Annotated[Path, typer.Argument(help="Folder for the engine container's PYTHONPATH.")],
) -> None:
    """Copy what an engine's container needs of modelswap into a folder."""
    package = Path(modelswap_engine.__file__).parent
    destination = directory / package.name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{package.name}.", dir=directory))
        try:
            shutil.copytree(package, draft / package.name, ignore=shutil.ignore_patterns("__pycache__"))
            if destination.exists():  # of an earlier start; nobody runs it yet, this comes before the engine
                destination.rename(draft / "before")
            (draft / package.name).rename(destination)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise BadRequest(
            f"{directory}: {error.strerror or error}", advice="name a folder that can be written"
        ) from None
    typer.echo(f"{destination}: modelswap {modelswap_engine.__version__}")
