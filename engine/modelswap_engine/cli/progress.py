"""A bar on stderr while bytes are gone through; silent where stderr is not a terminal."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from modelswap_engine.checkpoint.crew import Progress as Report


@contextlib.contextmanager
def bar(label: str) -> Iterator[Report]:
    """Show progress for the time of the block; what is handed out moves the bar."""
    with bars(label) as (only,):
        yield only


@contextlib.contextmanager
def bars(*labels: str) -> Iterator[tuple[Report, ...]]:
    """Show several bars, each from its first move on."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def mover(label: str) -> Report:
            task = progress.add_task(escape(label), total=None, start=len(labels) == 1, visible=len(labels) == 1)

            def move(done: int, total: int) -> None:
                progress.start_task(task)
                progress.update(task, completed=done, total=total, visible=True)

            return move

        yield tuple(mover(label) for label in labels)
