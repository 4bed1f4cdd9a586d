"""Process groups with somebody outside: a trainer that sends weights, an engine that takes or gives them.

Each is made apart from any group of the engine's own ranks and registered nowhere, so that neither can disturb the
other. The keys in the store are those of torch's own constructor, so a trainer joins with the tools it has. A group
that failed once has lost its step and is left at once.
"""

import dataclasses
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from modelswap_engine.backends.transfer import JoinGroup
from modelswap_engine.protocol.errors import BadRequest, Busy, GroupFailed, ModelswapError, UnknownGroup
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.transfer.buckets import raw

MOST_GROUPS: Final = 16
_library: Final[Any] = distributed_c10d
_DEVICE: Final = {"gloo": "cpu", "nccl": "cuda"}
_SHORTEST_NAP, _LONGEST_NAP = 0.0001, 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """One group, and where its tensors must lie; one that ``sends`` has no other rank of this engine in it."""

    name: str
    sends: bool
    rank: int
    size: int
    device: torch.device
    handle: Any

    def broadcast(self, tensors: Sequence[torch.Tensor], *, root: int, seconds: float, pace: Pace) -> None:
        """Send (as ``root``) or receive tensors, one after the other.

        Raises:
            GroupFailed: a member is gone, sends something else, or it took too long.
            Cancelled: ``pace`` was cancelled.
        """
        deadline = time.monotonic() + seconds
        try:
            options = _library.BroadcastOptions()
            options.rootRank = root
            options.rootTensor = 0
            options.timeout = timedelta(seconds=seconds)
            for work in [self.handle.broadcast([self._carried(tensor)], options) for tensor in tensors]:
                _finish(work, deadline=deadline, pace=pace)
        except ModelswapError:
            raise
        except RuntimeError as error:
            raise _failed(self.name, str(error)) from error

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        # Gloo does not know every dtype, and does not look at it either: bytes are bytes.
        return raw(tensor) if self.device.type == "cpu" else tensor


class Groups:
    """The groups that one rank is in.

    Args:
        number: of this rank; a group gives it the place after those of the ranks before it.
        alone: there is no other rank.
    """

    def __init__(self, number: int, *, alone: bool) -> None:
        self._number = number
        self._alone = alone
        self._groups: dict[str, Group] = {}
        self._first_only: set[str] = set()
        self._lock = threading.Lock()

    def join(self, order: JoinGroup) -> None:
        """Meet the other members; returns when all of them are there. Where weights leave only the first rank goes.

        Raises:
            Busy: there is a group with this name, or there are too many.
            GroupFailed: the others did not come in time.
        """
        with self._lock:
            known = self._groups.keys() | self._first_only
            if order.group in known or len(known) >= MOST_GROUPS:
                what = f"a group {order.group!r} exists" if order.group in known else "too many groups exist"
                raise Busy(what, advice="destroy the old group first, or choose another name")
            if order.sends and self._number:
                self._first_only.add(order.group)
                return
        rank = order.rank + self._number
        try:
            handle = _connect(order, rank)
        except (RuntimeError, ValueError, OSError) as error:
            raise _failed(order.group, str(error)) from error
        made = Group(
            name=order.group,
            sends=order.sends,
            rank=rank,
            size=order.size,
            device=torch.device(_DEVICE[order.backend]),
            handle=handle,
        )
        with self._lock:
            self._groups[order.group] = made

    def receiver(self, name: str) -> Group:
        """Return a group that all ranks of this engine receive through.

        Raises:
            UnknownGroup: this engine is in no such group.
            BadRequest: only the first rank is in it.
        """
        with self._lock:
            refused = name in self._first_only or (name in self._groups and self._groups[name].sends)
        if refused and not self._alone:
            raise BadRequest(
                f"group {name[:200]!r} was joined to send: only the first rank of this engine is in it",
                advice="join another group with all ranks (sends: false) to receive",
            )
        return self._find(name)

    def sender(self, name: str) -> Group:
        """Return a group that the first rank sends through.

        Raises:
            UnknownGroup: this engine is in no such group.
            BadRequest: the other ranks of this engine are in it, too, and would have to receive.
        """
        found = self._find(name)
        if not (found.sends or self._alone):
            raise BadRequest(
                f"group {name[:200]!r} was joined by all ranks of this engine: they would have to receive what is sent",
                advice="join another group with sends: true",
            )
        return found

    def _find(self, name: str) -> Group:
        with self._lock:
            found = self._groups.get(name)
            known = ", ".join(sorted(self._groups)) or "none"
        if found is None:
            raise UnknownGroup(
                f"this engine is in no group {name[:200]!r} (it is in: {known})",
                advice="initialise the group first, on every member at the same time",
                details={"group": name[:200]},
            )
        return found

    def discard(self, name: str) -> None:
        """Leave a group that is broken, if it is still there."""
        with self._lock:
            found = self._groups.pop(name, None)
        if found is not None:
            found.handle.abort()

    def leave(self, name: str) -> None:
        """Leave a group; that the engine is in it the first rank knows.

        Raises:
            UnknownGroup: this engine is in no such group.
        """
        if self._number:
            with self._lock:
                self._first_only.discard(name)
            self.discard(name)
        else:
            self.discard(self._find(name).name)


def _connect(order: JoinGroup, rank: int) -> Any:
    timeout = timedelta(seconds=order.seconds)
    host = f"[{order.address}]" if ":" in order.address else order.address
    url = f"tcp://{host}:{order.port}"
    store, _, _ = next(rendezvous(url, rank, order.size, timeout=timeout))
    store.set_timeout(timeout)
    scope = _library.PrefixStore
    scoped = scope(f"{_DEVICE[order.backend]}/", scope(f"{order.group}/", scope(order.group, store)))
    gloo = order.backend == "gloo"
    kind = _library.ProcessGroupGloo if gloo else _library.ProcessGroupNCCL
    options = kind._Options() if gloo else kind.Options()
    options._timeout = timeout
    if gloo:
        # Listens where the others can reach this process, and nowhere else.
        options._devices = [kind.create_device(hostname=_own_address(order.address, order.port))]
    return kind(scoped, rank, order.size, options)


def _own_address(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing; it only chooses a way
        probe.connect((address, port))
        own: str = probe.getsockname()[0]
        return own


def _finish(work: Any, *, deadline: float, pace: Pace) -> None:
    nap = _SHORTEST_NAP
    while not work.is_completed():
        pace.spend(0)
        if time.monotonic() > deadline:
            raise RuntimeError("the other members did not do their part in time")
        time.sleep(nap)
        nap = min(nap * 2, _LONGEST_NAP)
    work.wait()


def _failed(name: str, cause: str) -> GroupFailed:
    first = cause.strip().splitlines()[0][:300] if cause.strip() else "no reason given"
    return GroupFailed(
        f"process group {name!r}: {first}",
        advice="see that every member runs, names the same group, size and tensors, and begin again with a new group",
        details={"group": name},
    )
