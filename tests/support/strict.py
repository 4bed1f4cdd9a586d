"""Watches event loops for calls of ours that block them: in a test's own process, or in an engine process.

``python -m tests.support.strict serve …`` is ``python -m modelswap_engine serve …`` under that watch. A blocking call
ends it at once with the stack on standard error, so that whatever the test looks at, it fails.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from blockbuster import BlockBuster, blockbuster

STATUS = 97
PACKAGE = "modelswap_engine"
_ALLOWED = (
    # Before anything is served, and after everything has ended, nobody waits for the loop.
    ("modelswap_engine/cli/serve.py", ("_serve", "_coordinator")),
    ("modelswap_engine/cli/proxy.py", ("_serve", "_sidecar")),
    ("modelswap_engine/swap/journal.py", ("open", "close")),
    # A fake whose files are a few bytes.
    ("tests/support/fake_source.py", ("copy_side_files",)),
)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Make calls of ours that block the event loop raise, while the context lasts."""
    watch = BlockBuster(PACKAGE)
    for function in watch.functions.values():
        for file, names in _ALLOWED:
            function.can_block_in(file, names)
    watch.activate()
    try:
        yield
    finally:
        watch.deactivate()


class _Ending(blockbuster.BlockingError):
    """Raised by nobody: making one ends the process."""

    def __init__(self, func: str) -> None:
        sys.stderr.write(f"blocked the event loop by {func}\n")
        traceback.print_stack()
        sys.stderr.flush()
        os._exit(STATUS)


def main() -> None:
    """Run the command line under the watch."""
    from modelswap_engine.cli.main import main as command_line

    blockbuster.BlockingError = _Ending
    with watched():
        command_line()


if __name__ == "__main__":
    main()
