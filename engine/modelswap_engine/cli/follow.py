"""Following an operation from the command line: a progress bar on a terminal, plain lines elsewhere.

The stream of events may break (the engine's front is restarted, a tunnel drops); then the operation is asked for
again by its id, until it has ended or nobody answered for a minute. Progress goes to standard error.
"""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from modelswap_engine.cli.client import ControlClient, quoted
from modelswap_engine.cli.render import size, version
from modelswap_engine.protocol.errors import Unavailable
from modelswap_engine.protocol.messages import SwapStatus

PATIENCE_SECONDS = 60.0


def follow(client: ControlClient, first: SwapStatus, *, quiet: bool) -> SwapStatus:
    """Return the last state of the operation.

    Raises:
        Unavailable: nobody answered for ``PATIENCE_SECONDS``.
        NotFound: the engine does not know the operation (any more).
    """
    console = Console(stderr=True, highlight=False, quiet=quiet)
    statuses = _statuses(client, first)
    return _with_bar(console, statuses) if console.is_terminal and not quiet else _with_lines(console, statuses)


def _statuses(client: ControlClient, status: SwapStatus) -> Iterator[SwapStatus]:
    yield status
    answered = time.monotonic()
    while not status.state.terminal:
        try:
            for update in client.events(status.operation_id, after=status.seq):
                status, answered = update, time.monotonic()
                yield status
            if not status.state.terminal:
                status = client.get(f"/swaps/{quoted(status.operation_id)}", SwapStatus)
                answered = time.monotonic()
                yield status
        except Unavailable:
            if time.monotonic() - answered > PATIENCE_SECONDS:
                raise
            time.sleep(0.5)


def _with_lines(console: Console, statuses: Iterator[SwapStatus]) -> SwapStatus:
    last: SwapStatus | None = None
    for status in statuses:
        if last is None or status.state is not last.state:
            console.print(f"{status.state.value:<12} {_note(status)}".rstrip())
        last = status
    if last is None:
        raise Unavailable("the engine told nothing about the operation")
    return last


def _with_bar(console: Console, statuses: Iterator[SwapStatus]) -> SwapStatus:
    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("{task.description:<12}"), BarColumn(), note, TimeElapsedColumn())
    last: SwapStatus | None = None
    with Progress(*columns, console=console, transient=False) as progress:
        task = progress.add_task("Accepted", total=None, note="")
        for last in statuses:
            total = last.plan.bytes_to_fetch if last.plan else None
            done = last.bytes_travelled if total else 0
            if last.state.terminal:
                total, done = 1, 1
            progress.update(task, description=last.state.value, total=total, completed=done, note=_note(last))
    if last is None:
        raise Unavailable("the engine told nothing about the operation")
    return last


def _note(status: SwapStatus) -> str:
    if status.plan is None:
        return f"to {version(status.target)}"
    of = f"{status.plan.changed_tensors}/{status.plan.total_tensors} tensors"
    return f"{of}, {size(status.bytes_travelled)} of {size(status.plan.bytes_to_fetch)} fetched"
