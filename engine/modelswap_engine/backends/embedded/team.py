"""The ranks that hold one model together (tensor parallel): how their processes find each other, and how they agree.

They meet through a file in a folder that only this user can enter, and talk over the loopback interface alone (gloo;
nccl beside it where there is an accelerator, which nobody has tried yet). The generation loop has the library's groups
to itself; what is agreed here goes through a group of its own, because two threads in one group wait for each other
for ever. Every wait has a bound: a rank that waits longer knows that its team is broken.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as distributed
from transformers.distributed import mixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

from modelswap_engine.backends.embedded.wire import Seat
from modelswap_engine.protocol.errors import Internal, ModelswapError, PeerFailed

_library: Final[Any] = distributed
_loading: Final[Any] = mixin


class TeamBrokenError(RuntimeError):
    """A rank is gone or does not come; the groups of this process cannot be used any more."""


class Team:
    """This process's place among the ranks of one model; the default process group has been made.

    Args:
        device: where this rank computes.
        seconds: bound of every wait for the others while requests run.
        load_seconds: how much sooner one rank may be ready with a load than another.
    """

    def __init__(self, device: torch.device, *, seconds: float, load_seconds: float) -> None:
        self.index: int = _library.get_rank()
        self.size: int = _library.get_world_size()
        self.config = DistributedConfig(tp_size=self.size)
        dense, experts = (
            _library.init_device_mesh(device.type, shape, mesh_dim_names=names)
            for shape, names in (
                ((1, 1, 1, self.size), ("pp", "dp_replicate", "fsdp", "tp")),
                ((1, 1, self.size, 1), ("pp", "dp_replicate", "efsdp", "ep")),
            )
        )
        self._found = (device, TransformersDeviceMesh(dense, experts))
        for group in list(_library.distributed_c10d._world.pg_map):
            _library.set_timeout(timedelta(seconds=seconds), group)
        self._brief = self._group(seconds)
        self._patient = self._group(load_seconds)
        self._gathering = self._group(load_seconds)

    @staticmethod
    def _group(seconds: float) -> Any:
        backend = _library.get_backend()
        kind = "gloo" if "gloo" in backend else backend
        return _library.new_group(backend=kind, timeout=timedelta(seconds=seconds))

    @property
    def mesh(self) -> Any:
        """The device mesh that every load of this process uses."""
        return self._found[1]

    def all(self, answer: bool, what: str) -> bool:
        """Say whether every rank's answer is yes.

        Raises:
            TeamBrokenError: the others did not come, or are gone.
        """
        yes = torch.tensor([int(answer)])
        self._sum(yes, what, patient=False)
        return int(yes) == self.size

    def highest(self, words: list[int], what: str) -> list[int]:
        """Exchange numbers beside the control calls; return the highest of each. The ranks' transfers meet here.

        Raises:
            TeamBrokenError: the others did not come, or are gone.
        """
        shared = torch.tensor(words, dtype=torch.int64)
        self._exchange(what, lambda group: _library.all_reduce(shared, op=_library.ReduceOp.MAX, group=group))
        return [int(word) for word in shared.tolist()]

    def share(self, tensor: torch.Tensor, *, source: int, what: str) -> None:
        """Send a tensor in host memory from one rank to all, beside the control calls; in place.

        Raises:
            TeamBrokenError: the others did not come, or are gone.
        """
        self._exchange(what, lambda group: _library.broadcast(tensor, src=source, group=group))

    def _exchange(self, what: str, call: Callable[[Any], Any]) -> None:
        try:
            call(self._gathering)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise TeamBrokenError(f"{what}: the ranks of this model lost each other: {reason}") from error

    def _sum(self, words: torch.Tensor, what: str, *, patient: bool) -> None:
        try:
            _library.all_reduce(words, group=self._patient if patient else self._brief)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise TeamBrokenError(f"{what}: the ranks of this model lost each other: {reason}") from error

    @contextlib.contextmanager
    def lending_mesh(self) -> Iterator[None]:
        """Have transformers use this mesh: it would make another set of process groups with each load."""
        original = _loading.initialize_distributed_mesh
        _loading.initialize_distributed_mesh = lambda _: self._found
        try:
            yield
        finally:
            _loading.initialize_distributed_mesh = original

    @contextlib.contextmanager
    def together(self, what: str, *, patient: bool = False) -> Iterator[None]:
        """Do something that every rank does; where one of them fails, all have failed.

        A ``patient`` one waits as long for the others as a load may take.

        Raises:
            ModelswapError: this rank failed.
            PeerFailed: another one did; its own answer says why.
            TeamBrokenError: the others did not come, or are gone.
        """
        problem: ModelswapError | None = None
        try:
            yield
        except ModelswapError as error:
            problem = error
        except Exception as error:  # noqa: BLE001  # the others wait, whatever it was
            problem = Internal(f"{what}: {type(error).__name__}: {error}", advice="see the log of the worker")
        failed = torch.zeros(self.size, dtype=torch.int64)
        failed[self.index] = int(problem is not None)
        self._sum(failed, what if problem is None else f"{what} ({problem.message})", patient=patient)
        if problem is not None:
            raise problem
        if failed.any():
            others = ", ".join(str(index) for index in failed.nonzero().flatten().tolist())
            raise PeerFailed(
                f"{what} failed on rank {others} of this model", advice="see the answer of that rank for the reason"
            )


def join(seat: Seat, device: torch.device, *, start_seconds: float, seconds: float, load_seconds: float) -> Team:
    """Meet the other ranks.

    Args:
        seat: this rank's place among them.
        device: where it computes.
        start_seconds: how long the slowest may take to come up.
        seconds: see :class:`Team`.
        load_seconds: see :class:`Team`.

    Raises:
        RuntimeError: they did not all come.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _library.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_library.FileStore(seat.store, seat.size),
        rank=seat.index,
        world_size=seat.size,
        timeout=timedelta(seconds=start_seconds),
    )
    return Team(device, seconds=seconds, load_seconds=load_seconds)
