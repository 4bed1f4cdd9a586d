"""Loopback ports for servers that tests start, stop, and start again at the same address.

A port that the system chooses comes from the range out of which it also serves every outgoing connection: between the
end of a server and its next start somebody may get it. So these lie below that range (Linux: from 32768 on).
"""

import os
import random
import socket

_RANGE = (20_000, 30_000)
_given: set[int] = set()


def free_port() -> int:
    """Return a port that nobody listens on, and that this process was not given before.

    Raises:
        RuntimeError: there is none.
    """
    drawn = random.Random(os.urandom(8))
    for port in drawn.sample(range(*_RANGE), k=200):
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise RuntimeError("no free loopback port was found in 200 tries")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
