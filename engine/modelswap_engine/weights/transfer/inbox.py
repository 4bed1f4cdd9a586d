"""Where received checkpoint tensors wait: hashed, by name, and visible to nobody but the staging of their operation.

There is one session at a time. A receiver that was left behind keeps its session, which nobody looks at any more.
"""

import dataclasses
import threading

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """One received tensor with the sha256 of its bytes."""

    tensor: torch.Tensor
    sha256: str


class Session:
    """What arrived for one operation."""

    def __init__(self, operation_id: str) -> None:
        self.operation_id = operation_id
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()

    def put(self, name: str, tensor: torch.Tensor, sha256: str) -> None:
        """Keep a tensor; one that comes again replaces the first."""
        with self._lock:
            self._held[name] = Held(tensor, sha256)

    def take(self, name: str) -> Held | None:
        """Hand a tensor over, so that its memory is not held twice; None when it did not arrive."""
        with self._lock:
            return self._held.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes that wait here."""
        with self._lock:
            return sum(held.tensor.nbytes for held in self._held.values())


class Inbox:
    """The present session."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._lock = threading.Lock()

    def open(self, operation_id: str) -> Session:
        """Return the session of an operation; that of any other one is dropped."""
        with self._lock:
            if self._session is None or self._session.operation_id != operation_id:
                self._session = Session(operation_id)
            return self._session

    def take(self, operation_id: str, name: str) -> Held | None:
        """Hand over what arrived for an operation under a name."""
        session = self._session
        return session.take(name) if session is not None and session.operation_id == operation_id else None

    def forget(self, operation_id: str) -> None:
        """Drop what arrived for an operation."""
        with self._lock:
            if self._session is not None and self._session.operation_id == operation_id:
                self._session = None

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        session = self._session
        return session.nbytes if session is not None else 0
