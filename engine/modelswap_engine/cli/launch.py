"""``modelswap launch`` and ``modelswap engine-files``: our side of an engine's own container.

An engine's image has nothing of ours. ``engine-files`` copies this package (Python alone, no dependencies) to a volume
that both containers see, with the metadata in which SGLang looks for plugins. There ``python3 -m
modelswap_engine.backends.launch`` starts the engine. ``modelswap launch`` is the same for an image in which modelswap
is installed.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

import modelswap_engine
from modelswap_engine.backends.sglang import words
from modelswap_engine.protocol.errors import BadRequest

_DISTRIBUTION: Final = "modelswap.dist-info"


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
    try:
        directory.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{package.name}.", dir=directory))
        try:
            shutil.copytree(package, draft / "new" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
            _write_entry_point(draft / "new" / _DISTRIBUTION)
            (draft / "before").mkdir()
            for entry in (draft / "new").iterdir():
                if (
                    directory / entry.name
                ).exists():  # of an earlier start; nobody runs it, this comes before the engine
                    (directory / entry.name).rename(draft / "before" / entry.name)
                entry.rename(directory / entry.name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise BadRequest(
            f"{directory}: {error.strerror or error}", advice="name a folder that can be written"
        ) from None
    typer.echo(f"{directory / package.name}: modelswap {modelswap_engine.__version__}")


def _write_entry_point(folder: Path) -> None:
    """Have Python's own metadata say that modelswap is installed where its files are found."""
    folder.mkdir()
    about = ("Metadata-Version: 2.1", "Name: modelswap", f"Version: {modelswap_engine.__version__}", "")
    (folder / "METADATA").write_text("\n".join(about))
    name, target = words.PLUGIN
    (folder / "entry_points.txt").write_text(f"[{words.GROUP}]\n{name} = {target}\n")
