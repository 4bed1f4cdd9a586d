"""What a person sees while something takes its time: headings, steps with their seconds, commands as typed.

Knows nothing of models or clusters.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_TICK_SECONDS = 15.0


def heading(text: str) -> None:
    """Begin a part."""
    print(f"\n== {text}", flush=True)


def say(text: str) -> None:
    """Print lines, indented under the current heading."""
    print("\n".join(f"   {line}" if line else "" for line in text.splitlines()), flush=True)


def command(arguments: Sequence[str]) -> None:
    """Show a command as a person would type it."""
    print(f"\n$ {shlex.join(arguments)}", flush=True)


def complain(what: str, *, advice: str) -> None:
    """Say what failed and what to do next, on standard error."""
    print(f"error: {what}\nnext: {advice}", file=sys.stderr, flush=True)


@contextmanager
def step(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Announce something that takes long, say every 15 s that it goes on, and how long it took.

    ``quiet`` leaves out what is said in between, for what shows progress of its own.
    """
    started = time.monotonic()
    print(f"   {text} …", flush=True)
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(_TICK_SECONDS):
            print(f"   {text} … {time.monotonic() - started:.0f} s so far", flush=True)

    ticker = threading.Thread(target=tick, daemon=True)
    if not quiet:
        ticker.start()
    outcome = "failed after"
    try:
        yield
        outcome = "took"
    finally:
        ended.set()
        if not quiet:
            ticker.join()
        print(f"   {text} {outcome} {time.monotonic() - started:.1f} s", flush=True)


def megabytes(count: int) -> str:
    """Return a number of bytes in MB (10^6 bytes)."""
    return f"{count / 1e6:.1f} MB"


def milliseconds(seconds: float | None) -> str:
    """Return a duration in ms."""
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
