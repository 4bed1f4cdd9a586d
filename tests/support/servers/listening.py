"""A server program on a loopback port: well under a second to start where a core is free, ended by its own pid."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support.processes import Child

_SECONDS = 120.0


def listening(name: str, command: Sequence[str], *, port: int, home: Path) -> Child:
    """Start a program with its output in a log below `home`, and wait until it listens itself.

    That something accepts connections there would not do: it may be somebody else's, and this one about to fail.

    Raises:
        RuntimeError: it ended, or does not listen; with the end of its log.
    """
    child = Child(name, command, log=home / f"{name}.log")
    ends = time.monotonic() + _SECONDS
    while not _listens(child.pid, port):
        child.check()
        if time.monotonic() > ends:
            child.kill()
            raise RuntimeError(f"{name} does not listen after {_SECONDS:.0f} s; the end of its log:\n{child.tail()}")
        time.sleep(0.01)
    return child


def _listens(pid: int, port: int) -> bool:
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False  # it ended: asking the child says how
    return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in sockets)
