"""The ranks that hold one model together (tensor parallel): how their processes find each other, and how they agree.

They meet through a file in a folder that only this user can enter, and talk over the loopback interface alone (gloo;
nccl beside it where there is an accelerator, which nobody has tried yet). The generation loop has the library's groups
to itself; what is agreed here goes through a group of its own, because two threads in one group wait for each other
for ever. Every wait has a bound: a rank that waits longer knows that its team is broken.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as distributed
from transformers.distributed import mixin
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.utils import get_distributed_backend, initialize_distributed_mesh

from modelswap_engine.protocol.errors import ModelswapError, PeerFailed

LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_GRAPH_MIXING_SUPPORT": "0"}
"""Environment of a rank's process: gloo would otherwise listen on the pod's own address."""

_library: Final[Any] = distributed
_loading: Final[Any] = mixin


class Team:
    """This process's place among the ranks of one model; the default process group has been made.

    Args:
        seconds: bound of every wait for the others.
    """

    def __init__(self, *, seconds: float) -> None:
        self.index: int = _library.get_rank()
        self.size: int = _library.get_world_size()
        self.config = DistributedConfig(tp_size=self.size)
        self._found = initialize_distributed_mesh(self.config)
        self._own = _library.new_group(backend=self._backend(), timeout=timedelta(seconds=seconds))
        for group in list(_library.distributed_c10d._world.pg_map):
            _library.set_timeout(timedelta(seconds=seconds), group)

    @staticmethod
    def _backend() -> str:
        return str(_library.get_backend()) if _library.get_backend() == "fake" else "gloo"

    @property
    def mesh(self) -> Any:
        """The device mesh that every load of this process uses."""
        return self._found[1]

    @contextlib.contextmanager
    def lending_mesh(self) -> Iterator[None]:
        """Have transformers use this mesh: it would make another set of process groups with each load."""
        original = _loading.initialize_distributed_mesh
        _loading.initialize_distributed_mesh = lambda _: self._found
        try:
            yield
        finally:
            _loading.initialize_distributed_mesh = original

    def agree(self, problem: ModelswapError | None) -> None:
        """Return when every rank has come here without a problem.

        Raises:
            ModelswapError: this rank's problem.
            PeerFailed: another rank has one; its own answer says which.
            RuntimeError: the others did not come in time, or are gone.
        """
        failed = torch.zeros(self.size, dtype=torch.int64)
        failed[self.index] = int(problem is not None)
        _library.all_reduce(failed, group=self._own)
        if problem is not None:
            raise problem
        if failed.any():
            ranks = ", ".join(str(rank) for rank in failed.nonzero().flatten().tolist())
            raise PeerFailed(f"rank {ranks} of this model could not do it", advice="see the answer of that rank")


def join(*, store: str, index: int, size: int, start_seconds: float, seconds: float) -> Team:
    """Meet the other ranks.

    Args:
        store: a file that all of them can reach and nobody else.
        index: this rank's place among them.
        size: how many they are.
        start_seconds: how long the slowest may take to come up.
        seconds: bound of every later wait.

    Raises:
        RuntimeError: they did not all come.
    """
    kind = torch._C._get_accelerator().type
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{get_distributed_backend(kind)}"
    os.environ.setdefault("LOCAL_RANK", str(index))
    _library.init_process_group(
        backend,
        store=_library.FileStore(store, size),
        rank=index,
        world_size=size,
        timeout=timedelta(seconds=start_seconds),
    )
    return Team(seconds=seconds)
