"""Ports of test servers: no two processes are given the same one, however late their servers listen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.free_ports import free_port

_HOLDER = (
    "import sys; from tests.support.free_ports import free_port;"
    "print(free_port(range(int(sys.argv[1]), int(sys.argv[1]) + 1)), flush=True); sys.stdin.read()"
)


def test_a_port_is_given_once_until_its_process_ends() -> None:
    port = free_port(range(19_000, 20_000))  # below what others draw from
    other = range(port - 1_000, port - 999)
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(other[0])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == f"{other[0]}\n"
        with pytest.raises(RuntimeError, match="1 tries"):
            free_port(other)
        holder.stdin.close()
        holder.wait()
    assert free_port(other) == other[0]


def test_this_process_is_not_given_a_port_twice() -> None:
    one = free_port()
    with pytest.raises(RuntimeError, match="no free loopback port"):
        free_port(range(one, one + 1))
