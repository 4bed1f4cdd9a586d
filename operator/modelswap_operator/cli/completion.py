"""``kubectl_complete-modelswap``: completes ``kubectl modelswap`` in a shell whose kubectl completes.

kubectl runs it with the words so far and reads what cobra's own ``__complete`` prints: one candidate a line with its
help behind a tab, and a last line with a directive. typer prints such lines for the shell fish.
"""

import contextlib
import io
import os
import shlex
import sys

from modelswap_operator.cli.app import app

PROGRAM = "kubectl-modelswap"
NO_FILES = ":4"


def main() -> None:
    """Print what may come next."""
    words = sys.argv[1:]
    done, last = words[:-1], words[-1] if words else ""
    os.environ.update(
        {
            "_KUBECTL_MODELSWAP_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_ARGS": f"{shlex.join([PROGRAM, *done])} {shlex.quote(last) if last else ''}",
        }
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        app(prog_name=PROGRAM, args=[])
    sys.stdout.write(said.getvalue().rstrip("\n") + f"\n{NO_FILES}\n")
