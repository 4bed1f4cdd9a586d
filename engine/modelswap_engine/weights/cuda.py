"""Copies to and from a CUDA device on a stream of their own. The only file that knows CUDA; it decides nothing."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from modelswap_engine.weights.place import Room


class CudaCopies:
    """A side stream of one device; see :class:`~modelswap_engine.weights.place.Copies`.

    What is allocated behind the copies belongs to this stream, so memory that is freed while the model computes is
    used again only for later work of the same stream: the model has let go of it before it is freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._device

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return page-locked memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Queue a copy."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._mark()

    def _mark(self) -> Callable[[], None]:
        # A thread that waits sleeps instead of spinning: the loop needs the core.
        reached = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        reached.record(self._stream)
        return reached.synchronize

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Queue what is computed inside behind the copies."""
        with torch.cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        """Wait for the stream."""
        self._mark()()

    def quiesce(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)

    def trim(self) -> None:
        """Give cached memory back to the device."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def room(self) -> Room:
        """Return what the device has; what torch holds without using it counts as available."""
        free, total = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return Room(limit=total, available=free + cached)
