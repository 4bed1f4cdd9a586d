"""The command ``kubectl modelswap`` (``kubectl-modelswap`` on the PATH)."""

import sys

from modelswap_engine.cli.program import program, report
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_operator.cli import asking, changing, doctor, injecting, looking
from modelswap_operator.cli.failures import Exit, PluginError

app = program(
    "kubectl-modelswap",
    about="Look at slots, find out what is wrong, and go back. Exit codes: 1 failed or stalled, 2 wrong usage, "
    "3 timed out, 4 the cluster refused.",
)

for _module in (looking, doctor, asking, changing, injecting):
    _module.register(app)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except PluginError as error:
        report(error.message, error.advice)
        sys.exit(error.code)
    except ModelswapError as error:
        report(f"{error.code}: {error.message}", error.advice)
        sys.exit(Exit.FAILED)
    except BrokenPipeError:  # `kubectl modelswap status | head`
        sys.stderr.close()
        sys.exit(Exit.FAILED)
