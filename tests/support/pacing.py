"""Answers of the embedded engine that last as long as a test wants, however busy the machine is.

A tiny model writes hundreds of tokens a second, so that an answer that a test begins may have ended before the test's
next step, where its process gets no turn for a moment. Between the two the worker hands tokens on slowly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN_SECONDS = 0.05
"""For each request of a batch. Two hundred tokens that are still to come are more than ten seconds."""


def variables(file: Path) -> dict[str, str]:
    """Return what a worker is started with so that :func:`slowly` reaches it."""
    file.write_text("")
    return {"MODELSWAP_FAULT": f"file:{file}"}


@contextmanager
def slowly(file: Path) -> Iterator[None]:
    """Have tokens come slowly while the context lasts; what is asked in it does not end in it, unless it is short."""
    before = file.read_text()
    file.write_text(f"token:delay={TOKEN_SECONDS}")
    try:
        yield
    finally:
        file.write_text(before)
