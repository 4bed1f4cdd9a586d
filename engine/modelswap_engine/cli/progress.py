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
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(label), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
