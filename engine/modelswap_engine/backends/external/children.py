"""Running one program so that nothing it started outlives it, or this process.

The program gets a process group of its own. When it ends, or when this process is told to end, what is left is asked
and then made to: its group, and every orphan that left the group, which the kernel hands to this process (it is process
1 of its container, or says that it takes orphans in). Signals are waited for and never handled, so there is no moment
at which one is lost. Knows no engine; Linux and the standard library only.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_WAITED: Final = STOPS | {signal.SIGCHLD}
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_SECONDS: Final = 1.0
_LEFT_SECONDS: Final = 5.0
_KILLED_SECONDS: Final = 10.0

Clock = Callable[[], float]


def hold_signals() -> None:
    """From now on signals wait for :func:`stop_asked` and :func:`run`; call it first, in the only thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    # Fails on nothing that matters: without it orphans go to process 1, which a launcher in a container is.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def stop_asked(seconds: float) -> bool:
    """Wait so long; True as soon as this process was asked to end."""
    return signal.sigtimedwait(STOPS, seconds) is not None


def run(command: Sequence[str], environment: Mapping[str, str], *, stop_seconds: float, clock: Clock) -> int:
    """Run a program to its end and return its exit code, 128 + n where signal n ended it.

    A first SIGTERM or SIGINT is passed on to the program alone, so that it ends its own children in its own order;
    after ``stop_seconds``, or at a second one, all of it is killed.

    Raises:
        OSError: the program cannot be started.
    """
    pid = os.posix_spawnp(
        command[0], list(command), dict(environment), setpgroup=0, setsigmask=[], setsigdef=sorted(_WAITED)
    )
    patience = _LEFT_SECONDS
    try:
        status, in_time = _ended(pid, stop_seconds=stop_seconds, clock=clock)
        patience = patience if in_time else 0.0
        return _exit_code(status)
    finally:
        _clear(pid, patience=patience, clock=clock)


def _ended(pid: int, *, stop_seconds: float, clock: Clock) -> tuple[int, bool]:
    """Wait for the end of the program; False with its status when it had to be killed."""
    deadline: float | None = None
    while True:
        status = _reap().get(pid)
        if status is not None:
            return status, deadline is None or clock() < deadline
        wait = _POLL_SECONDS if deadline is None else max(0.0, min(_POLL_SECONDS, deadline - clock()))
        got = signal.sigtimedwait(_WAITED, wait)
        if got is not None and got.si_signo in STOPS:
            if deadline is None:
                deadline = clock() + stop_seconds
                _send(pid, signal.SIGTERM)
            else:
                deadline = clock()
        if deadline is not None and clock() >= deadline:
            _send(-pid, signal.SIGKILL)


def _clear(pid: int, *, patience: float, clock: Clock) -> None:
    """End whatever the program left behind: asked first, then killed; bounded."""
    began = clock()
    _send(-pid, signal.SIGTERM)
    for child in _children():
        _send(child, signal.SIGTERM)
    while _left(pid) and clock() - began < patience:
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
    while _left(pid) and clock() - began < patience + _KILLED_SECONDS:
        _send(-pid, signal.SIGKILL)
        for child in _children():
            _send(child, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _left(pid: int) -> bool:
    _reap()
    return bool(_children()) or _send(-pid, 0)


def _reap() -> dict[int, int]:
    """Collect all children that have ended: process id to wait status."""
    found = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found[pid] = status
    return found


def _children() -> list[int]:
    own = os.getpid()
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    return []


def _send(pid: int, number: int) -> bool:
    """Signal a process, or the group -pid; False when there is none."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # a group whose members have another user by now; not ours to end
        return False
    return True


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
