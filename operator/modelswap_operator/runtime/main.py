"""The entry point: reads flags, sets up logs and signals, runs the operator, returns its exit code."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from modelswap_engine.protocol.telemetry import export
from modelswap_operator.runtime import logs
from modelswap_operator.runtime.app import Operator
from modelswap_operator.runtime.settings import Settings, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until it is told to stop."""
    settings = parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    logs.configure(form=settings.log_format, level=settings.log_level)
    export("modelswap-operator")
    if settings.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(settings.kubeconfig)  # kopf's watches log in by it
    return asyncio.run(_run(settings))


async def _run(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    return await Operator(settings).run(stop)
