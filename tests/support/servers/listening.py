"""A server program on a loopback port, started in well under a second and stopped by its own pid."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import Child

_SECONDS = 30.0


def listening(name: str, command: Sequence[str], *, port: int, home: Path) -> Child:
    """Start a program with its output in a log below `home`, and wait until it accepts connections.

    Raises:
        RuntimeError: it ended, or does not listen; with the end of its log.
    """
    child = Child(name, command, log=home / f"{name}.log")
    ends = time.monotonic() + _SECONDS
    while not _accepts(port):
        child.check()
        if time.monotonic() > ends:
            child.kill()
            raise RuntimeError(f"{name} does not listen after {_SECONDS:.0f} s; the end of its log:\n{child.tail()}")
        time.sleep(0.01)
    return child


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
