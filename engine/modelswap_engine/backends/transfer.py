"""The transfer half of the backend port: weights that arrive from outside a checkpoint folder, or leave the engine.

What arrives is kept in an *inbox* of the operation it belongs to, as checkpoint tensors with their hashes, and nothing
of it is live: :class:`~modelswap_engine.backends.port.Stage` names it by ranges without a path, and from there on it
goes the way of every version. One order, one answer per rank, each bounded in time by the backend.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from modelswap_engine.backends.port import Record, RequestPolicy, TensorRange
from modelswap_engine.protocol.errors import ErrorBody

_MEMORY: Final = "memory:"


def memory_of(process: int, descriptor: int) -> str:
    """Return the path of a :class:`TensorRange` in anonymous memory that a process of this engine has open.

    No path of a source begins like this.
    """
    return f"{_MEMORY}{process}:{descriptor}"


def memory_path(path: str) -> str | None:
    """Return where the system shows such memory; None for any other path."""
    if not path.startswith(_MEMORY):
        return None
    process, descriptor = map(int, path.removeprefix(_MEMORY).split(":"))
    return f"/proc/{process}/fd/{descriptor}"


class ReceiveFiles(Record, frozen=True, kw_only=True, tag=True):
    """Copy tensors out of local files (a body that was put down, a shared memory segment) into the inbox.

    A range with an empty ``sha256`` is hashed as it is copied. ``loader`` names a custom loader that turns what was
    sent into checkpoint tensors; empty takes it as it is.
    """

    operation_id: str
    tensors: tuple[TensorRange, ...]
    loader: str = ""


class TensorSpec(Record, frozen=True, kw_only=True):
    """A tensor that somebody announces to send."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class JoinGroup(Record, frozen=True, kw_only=True, tag=True):
    """Meet others in a process group at an address; a rank joins at ``rank`` plus its own number.

    With ``sends`` only the first rank joins, at ``rank``: weights leave through it, and nothing is received there.
    ``backend`` is ``gloo`` (tensors in host memory) or ``nccl`` (in the device's).
    """

    group: str
    address: str
    port: int
    rank: int
    size: int
    backend: str = "gloo"
    sends: bool = False
    seconds: float


class LeaveGroup(Record, frozen=True, kw_only=True, tag=True):
    """Leave a process group."""

    group: str


class ReceiveBroadcast(Record, frozen=True, kw_only=True, tag=True):
    """Take tensors into the inbox that a member of a group broadcasts, in this order.

    ``flattened``: they come as the bytes of one tensor, one after the other.
    """

    operation_id: str
    group: str
    tensors: tuple[TensorSpec, ...]
    root: int = 0
    flattened: bool = False
    loader: str = ""
    seconds: float


class SendBroadcast(Record, frozen=True, kw_only=True, tag=True):
    """Broadcast live tensors, in checkpoint coordinates and in this order, to a group."""

    group: str
    names: tuple[str, ...]
    seconds: float


class WriteFile(Record, frozen=True, kw_only=True, tag=True):
    """Write tensors into one new safetensors file at ``path``; a range without a path is live."""

    path: str
    tensors: tuple[TensorRange, ...]


class FillMemory(Record, frozen=True, kw_only=True, tag=True):
    """Write live tensors into shared memory, each at the offset that its range says, proven by its hash.

    What one replica holds is brought to another like this.
    """

    tensors: tuple[TensorRange, ...]


class ReadTensor(Record, frozen=True, kw_only=True, tag=True):
    """Read the first rows of one live tensor."""

    name: str
    rows: int


class FlushCache(Record, frozen=True, kw_only=True, tag=True):
    """Forget all cached keys and values, after doing with running requests what the policy says."""

    policy: RequestPolicy


Outgoing = SendBroadcast | WriteFile | FillMemory | ReadTensor
"""Orders to give weights out: one replica is enough."""

TransferOrder = ReceiveFiles | JoinGroup | LeaveGroup | ReceiveBroadcast | FlushCache | Outgoing


class ReceivedTensor(Record, frozen=True, kw_only=True):
    """A checkpoint tensor as it lies in the inbox; ``sha256`` is of the bytes that the rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


class Reading(Record, frozen=True, kw_only=True):
    """Numbers of a tensor in row-major order, and the shape of what was read."""

    dtype: str
    shape: tuple[int, ...]
    numbers: tuple[float, ...]


class TransferReply(Record, frozen=True, kw_only=True):
    """What one rank answers; ``error`` None means that it did what was asked."""

    rank: int
    boot_id: str
    error: ErrorBody | None = None
    received: tuple[ReceivedTensor, ...] = ()
    reading: Reading | None = None
    requests: int = 0


class Transfers(Protocol):
    """A backend that takes weights in and gives them out.

    Raises, from :meth:`transfer`:
        WorkerLost: a rank died.
        Cancelled: it took longer than ``timeout`` seconds and was called off.
    """

    async def transfer(self, order: TransferOrder, *, timeout: float) -> Sequence[TransferReply]:
        """Carry out one order on every rank, or on those of one replica where weights leave."""
