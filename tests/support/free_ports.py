"""Loopback ports for servers that tests start, stop, and start again at the same address.

A port that the system chooses comes from the range out of which it also serves every outgoing connection: between the
end of a server and its next start somebody may get it. So these lie below that range (Linux: from 32768 on).

A port is given once among all the test processes of this machine: each holds a lock on a file of the port's name until
it ends. Without it two processes may find the same port free before either's server listens there, and one of them then
speaks with the other's server.
"""

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

_PORTS = range(20_000, 30_000)
_held: dict[int, int] = {}
"""The file that is locked for each port of this process."""


def free_port(ports: Sequence[int] = _PORTS) -> int:
    """Return a port that nobody listens on, and that no process was given that still runs, this one included.

    Raises:
        RuntimeError: there is none.
    """
    drawn = random.Random(os.urandom(8))
    tries = drawn.sample(ports, k=min(200, len(ports)))
    for port in tries:
        if port not in _held and _lock(port) and _is_free(port):
            return port
    raise RuntimeError(f"no free loopback port was found in {len(tries)} tries")


def _lock(port: int) -> bool:
    folder = Path(tempfile.gettempdir()) / f"modelswap-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _held[port] = file
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
