"""The command ``modelswap``.

Modules that do the work are imported when their command runs, so that ``modelswap --help`` and ``modelswap
manifest build`` need neither torch nor an HTTP library. Exit code 1 for what failed, 2 for wrong usage.
"""

import sys

from modelswap_engine.cli import adapters, delta, diff, launch, manifest, operations, proxying, publish, serving
from modelswap_engine.cli.program import program, report
from modelswap_engine.protocol.errors import ModelswapError

app = program("modelswap", about="Change the weights of a running inference engine: no restart, no dropped requests.")

for _module in (serving, proxying, operations, adapters, manifest, diff, delta, publish, launch):
    _module.register(app)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except ModelswapError as error:
        report(error.message, error.advice)
        sys.exit(1)
    except BrokenPipeError:  # `modelswap state | head`
        sys.stderr.close()
        sys.exit(1)
