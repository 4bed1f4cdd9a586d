"""The transfer half of the backend port: weights that arrive from outside a checkpoint folder, or leave the engine.

What arrives is kept in an *inbox* of the operation it belongs to, as checkpoint tensors with their hashes, and nothing
of it is live: :class:`~modelswap_engine.backends.port.Stage` names it by ranges without a path, and from there on it
goes the way of every version. One order, one answer per rank, each bounded in time by the backend.
"""

from collections.abc import Sequence
from typing import Protocol

from modelswap_engine.backends.port import Record, TensorRange
from modelswap_engine.protocol.errors import ErrorBody


class ReceiveFiles(Record, frozen=True, kw_only=True, tag=True):
    """Copy tensors out of local files (a body that was put down, a shared memory segment) into the inbox.

    A range with an empty ``sha256`` is hashed as it is copied. ``loader`` names a custom loader that turns what was
    sent into checkpoint tensors; empty takes it as it is.
    """

    operation_id: str
    tensors: tuple[TensorRange, ...]
    loader: str = ""


TransferOrder = ReceiveFiles


class ReceivedTensor(Record, frozen=True, kw_only=True):
    """A checkpoint tensor as it lies in the inbox; ``sha256`` is of the bytes that the rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


class TransferReply(Record, frozen=True, kw_only=True):
    """What one rank answers; ``error`` None means that it did what was asked."""

    rank: int
    boot_id: str
    error: ErrorBody | None = None
    received: tuple[ReceivedTensor, ...] = ()


class Transfers(Protocol):
    """A backend that takes weights in and gives them out.

    Raises, from :meth:`transfer`:
        WorkerLost: a rank died.
        Cancelled: it took longer than ``timeout`` seconds and was called off.
    """

    async def transfer(self, order: TransferOrder, *, timeout: float) -> Sequence[TransferReply]:
        """Carry out one order on every rank."""
