"""Where weights lie, and how bytes get there and back: on the host at once, on a device piece by piece.

A device is fed through a few page-locked buffers, beside what it computes, so the host never holds more of a tensor
than its pieces in flight, and whoever hashes sees the bytes as they were read. It knows no checkpoint, no hash and no
kind of device: how bytes are sent comes in as :class:`Copies`.
"""

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import torch

from modelswap_engine.protocol.errors import InsufficientMemory
from modelswap_engine.weights import anonymous

PIECE: Final = 4 << 20
"""Bytes that are read, hashed and looked through in one go, while a processor's cache still has them. With less, those
who read take the interpreter away from those who decode more often than they need to."""


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes of a device's own memory; ``available`` is what tensors can still take."""

    limit: int
    available: int


class Landing(Protocol):
    """The memory of one tensor while its bytes arrive."""

    @property
    def piece(self) -> int:
        """Bytes of a window at most."""

    def window(self, begin: int, end: int) -> memoryview:
        """Return host memory into which these bytes are to be read next."""

    def land(self) -> None:
        """The bytes of the last window are there and will not be looked at again."""

    def tensor(self) -> torch.Tensor:
        """Return the bytes as they lie where they belong, to be used inside ``beside`` or after ``settle``."""


class Place(Protocol):
    """Where the weights of a model lie."""

    @property
    def device(self) -> torch.device:
        """The device."""

    def landing(self, nbytes: int) -> contextlib.AbstractContextManager[Landing]:
        """Make room for a tensor.

        Raises:
            InsufficientMemory: the device is full.
        """

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor that lies here, in row-major order; each piece is valid until the next."""

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Work on tensors here beside what the model computes, in the order in which it is asked for.

        Raises:
            InsufficientMemory: the device is full.
        """

    def settle(self) -> None:
        """Wait until all that was asked for beside the model is done."""

    def quiesce(self) -> None:
        """Wait until the device has done everything that was asked of it."""

    def trim(self) -> None:
        """Give back memory that is held for nobody."""

    def room(self) -> Room | None:
        """Return the device's own memory; None where tensors take that of the process."""


class Copies(Protocol):
    """A queue of copies between host and device; they happen in order, some time later."""

    @property
    def device(self) -> torch.device:
        """The device."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return host memory that copies can use while the host goes on."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Queue a copy; return a call that waits for its end."""

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Queue what is computed inside behind the copies."""

    def settle(self) -> None:
        """Wait for all of the queue."""

    def quiesce(self) -> None:
        """Wait for all that the device was asked for by anybody."""

    def trim(self) -> None:
        """Give back memory that is held for nobody."""

    def room(self) -> Room:
        """Return the device's memory."""


class Host:
    """Weights in the memory of the process: there is nowhere to send them."""

    device: Final = torch.device("cpu")

    @contextlib.contextmanager
    def landing(self, nbytes: int) -> Iterator[Landing]:
        """Make room for a tensor."""
        yield _HostLanding(nbytes)

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield all bytes at once: the memory itself where it is contiguous."""
        yield flat(tensor).cpu().numpy().data

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Do nothing special: threads of low priority are beside the model as they are."""
        yield

    def settle(self) -> None:
        """Everything is done when it returns."""

    def quiesce(self) -> None:
        """Everything is done when it returns."""

    def trim(self) -> None:
        """The allocator of the process decides."""

    def room(self) -> None:
        """Tensors take the memory of the process."""


HOST: Final = Host()


class _HostLanding:
    piece: Final = PIECE

    def __init__(self, nbytes: int) -> None:
        self._raw = anonymous.empty(nbytes)
        self._view = self._raw.numpy().data

    def window(self, begin: int, end: int) -> memoryview:
        return self._view[begin:end]

    def land(self) -> None:
        pass

    def tensor(self) -> torch.Tensor:
        return self._raw


class _Lane:
    """Two buffers of one transfer: while one is on its way, the other is filled or read."""

    def __init__(self, copies: Copies, piece: int) -> None:
        self._copies = copies
        self._waiting: deque[tuple[torch.Tensor, Callable[[], None]]] = deque(
            (copies.buffer(piece), _nothing) for _ in range(2)
        )

    def take(self) -> torch.Tensor:
        """Return the buffer whose copy was queued longest ago, when that copy is done."""
        buffer, wait = self._waiting.popleft()
        wait()
        return buffer

    def put(self, buffer: torch.Tensor, wait: Callable[[], None]) -> None:
        self._waiting.append((buffer, wait))


def _nothing() -> None:
    pass


class OnDevice:
    """Weights in a device's own memory.

    Args:
        copies: of the device.
        piece: bytes of one buffer; every transfer has two, and there is one transfer for each thread that reads or
            hashes at a time.
    """

    def __init__(self, copies: Copies, *, piece: int = PIECE) -> None:
        self._copies = copies
        self._piece = piece
        self._idle: list[_Lane] = []
        self._lock = threading.Lock()

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._copies.device

    @contextlib.contextmanager
    def landing(self, nbytes: int) -> Iterator[Landing]:
        """Make room for a tensor."""
        with self.beside():
            raw = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        with self._lane() as lane:
            yield _DeviceLanding(self._copies, lane, raw, self._piece)

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        # Page-locking takes milliseconds, so buffers are kept; a thread that hangs in its source keeps only its own.
        with self._lock:
            lane = self._idle.pop() if self._idle else None
        lane = lane or _Lane(self._copies, self._piece)
        yield lane
        # Not after an error: a buffer may be missing then.
        with self._lock:
            self._idle.append(lane)

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor; the next piece is on its way while one is looked at."""
        with self.beside():
            raw = flat(tensor)
        with self._lane() as lane:
            coming: tuple[torch.Tensor, Callable[[], None]] | None = None
            for begin in range(0, len(raw), self._piece):
                source, buffer = raw[begin : begin + self._piece], lane.take()
                wait = self._copies.copy(buffer[: len(source)], source)
                lane.put(buffer, wait)
                if coming is not None:
                    yield _arrived(coming)
                coming = buffer[: len(source)], wait
            if coming is not None:
                yield _arrived(coming)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Work behind the copies."""
        try:
            with self._copies.beside():
                yield
        except torch.OutOfMemoryError as error:
            raise full(error) from error

    def settle(self) -> None:
        """Wait for the copies and what was worked behind them."""
        self._copies.settle()

    def quiesce(self) -> None:
        """Wait for everything."""
        self._copies.quiesce()

    def trim(self) -> None:
        """Give memory back."""
        self._copies.trim()

    def room(self) -> Room:
        """Return the device's memory."""
        return self._copies.room()


class _DeviceLanding:
    def __init__(self, copies: Copies, lane: _Lane, raw: torch.Tensor, piece: int) -> None:
        self._copies, self._lane, self._raw = copies, lane, raw
        self.piece = piece
        self._buffer, self._target = raw[:0], raw[:0]

    def window(self, begin: int, end: int) -> memoryview:
        self._buffer, self._target = self._lane.take(), self._raw[begin:end]
        return self._buffer.numpy().data[: end - begin]

    def land(self) -> None:
        source = self._buffer[: len(self._target)]
        self._lane.put(self._buffer, self._copies.copy(self._target, source))

    def tensor(self) -> torch.Tensor:
        return self._raw


def _arrived(coming: tuple[torch.Tensor, Callable[[], None]]) -> memoryview:
    piece, wait = coming
    wait()
    return piece.numpy().data


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in row-major order, where it lies."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def full(error: torch.OutOfMemoryError) -> InsufficientMemory:
    """Return the refusal that a full device means."""
    said = str(error).partition("\n")[0]
    return InsufficientMemory(
        f"the device's memory is full: {said}",
        advice="give the KV cache less (--kv-blocks), do not keep the previous version, or use a larger device",
    )
