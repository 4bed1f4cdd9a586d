"""The sending side: one tensor to look at, whole files, or everything to the members of a group.

Frozen, and given what it needs as callbacks. It works on a snapshot beside the requests that run; what it gives out are
checkpoint tensors, never the engine's own layout, so that whoever takes them needs no knowledge of this engine.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch

from modelswap_engine.backends.port import TensorRange
from modelswap_engine.backends.transfer import FillMemory, Reading, ReadTensor, SendBroadcast, WriteFile
from modelswap_engine.protocol.errors import BadRequest, ModelswapError
from modelswap_engine.weights.export.view import Whole
from modelswap_engine.weights.export.writer import fill_memory, write_file
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.place import HOST
from modelswap_engine.weights.reader import DTYPES, read_tensor
from modelswap_engine.weights.transfer.groups import Group, Groups

MOST_NUMBERS: Final = 1 << 20
_IN_FLIGHT: Final = 64 << 20
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightExporter:
    """Gives weights out.

    Attributes:
        get_view: returns the live tensors of this moment.
        groups: the process groups that they may be sent to.
    """

    get_view: Callable[[], Whole]
    groups: Groups

    def read(self, order: ReadTensor) -> Reading:
        """Return the first rows of one tensor as numbers.

        Raises:
            IncompatibleModel: the engine does not hold it.
            BadRequest: more numbers than anybody can look at.
        """
        view = self.get_view()
        tensor = view.tensor(order.name)
        rows = tensor[: order.rows] if tensor.dim() else tensor
        if rows.numel() > MOST_NUMBERS:
            raise BadRequest(
                f"{rows.numel()} numbers of tensor {order.name}; at most {MOST_NUMBERS} are told",
                advice="ask for fewer rows, or save the weights",
            )
        with view.place.beside():
            numbers = rows.cpu().to(torch.float64).reshape(-1).tolist()
        return Reading(dtype=_NAMES[tensor.dtype], shape=tuple(rows.shape), numbers=tuple(numbers))

    def write(self, order: WriteFile, *, pace: Pace) -> None:
        """Write tensors into one file; those with a path are copied from there.

        Raises:
            ManifestMismatch: what is live is not what the order says.
            ModelswapError: see :func:`~modelswap_engine.weights.export.writer.write_file`.
        """
        view = self.get_view()

        def pieces(wanted: TensorRange) -> Iterator[memoryview]:
            if wanted.path:
                return HOST.pieces(read_tensor(wanted, pace=pace))
            return view.place.pieces(view.tensor(wanted.name))

        write_file(Path(order.path), order.tensors, pieces, pace=pace)

    def fill(self, order: FillMemory, *, pace: Pace) -> None:
        """Write live tensors where their ranges say.

        Raises:
            ManifestMismatch: what is live is not what the order says.
            ModelswapError: see :func:`~modelswap_engine.weights.export.writer.fill_memory`.
        """
        view = self.get_view()
        fill_memory(order.tensors, lambda wanted: view.place.pieces(view.tensor(wanted.name)), pace=pace)

    def send(self, order: SendBroadcast, *, pace: Pace) -> None:
        """Broadcast live tensors in the order's order; a group that fails at it is left.

        Raises:
            UnknownGroup: this engine is in no such group.
            BadRequest: all ranks of this engine are in it.
            GroupFailed: a member is gone, or took too long.
            IncompatibleModel: the engine does not hold a tensor.
        """
        group, view = self.groups.sender(order.group), self.get_view()
        try:
            self._send(order, group, view, pace=pace)
        except ModelswapError:
            self.groups.discard(order.group)
            raise

    def _send(self, order: SendBroadcast, group: Group, view: Whole, *, pace: Pace) -> None:
        waiting: list[torch.Tensor] = []
        size = 0
        for number, name in enumerate(order.names, start=1):
            with view.place.beside():
                waiting.append(view.tensor(name).to(group.device).contiguous())
            size += waiting[-1].nbytes
            if size >= _IN_FLIGHT or number == len(order.names):
                view.place.settle()  # the group has a queue of its own
                group.broadcast(waiting, root=group.rank, seconds=order.seconds, pace=pace)
                waiting, size = [], 0


def names_in(order: WriteFile | FillMemory | SendBroadcast | ReadTensor) -> tuple[str, ...]:
    """Return the live tensors that an order asks for, in the order in which it does."""
    match order:
        case WriteFile() | FillMemory():
            live = (item for item in order.tensors if not item.path or isinstance(order, FillMemory))
            return tuple(item.name for item in live)
        case SendBroadcast():
            return order.names
        case ReadTensor():
            return (order.name,)
