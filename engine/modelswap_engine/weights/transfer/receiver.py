"""The receiving side of a weight update: each source yields tensors into the inbox, none of them touches what is live.

Frozen, and given what it needs as callbacks: it holds no model, so a model that is loaded anew is seen at the next
call, and a failed update has nothing to restore.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch

from modelswap_engine.backends.transfer import ReceiveBroadcast, ReceivedTensor, ReceiveFiles
from modelswap_engine.protocol.errors import ModelswapError, UnsupportedFormat
from modelswap_engine.weights.finite import check_finite, not_finite
from modelswap_engine.weights.hashing import sha256_of
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.reader import DTYPES, check_hash, copy_tensor
from modelswap_engine.weights.transfer.buckets import empty_tensors, unflatten
from modelswap_engine.weights.transfer.groups import Groups
from modelswap_engine.weights.transfer.inbox import Inbox
from modelswap_engine.weights.transfer.loaders import WeightLoaders, converted

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
Arrival = tuple[str, torch.Tensor, str]
"""A name, a tensor and the hash of its bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceiver:
    """Takes weights in.

    Attributes:
        get_inbox: returns the inbox of the model that is loaded now.
        loaders: the custom loaders that may be used.
        groups: the process groups that somebody may send through.
    """

    get_inbox: Callable[[], Inbox]
    loaders: WeightLoaders
    groups: Groups

    def receive_files(self, order: ReceiveFiles, *, pace: Pace) -> tuple[ReceivedTensor, ...]:
        """Copy tensors out of files; a file may be a segment of shared memory.

        Raises:
            UnknownLoader: the named loader is not allowed.
            ModelswapError: see :func:`~modelswap_engine.weights.reader.read_tensor`.
        """

        def arrivals() -> Iterator[Arrival]:
            for wanted in order.tensors:
                copied = copy_tensor(wanted, pace=pace)
                if wanted.sha256:
                    check_hash(wanted, copied.sha256)
                if not copied.finite:
                    raise not_finite(wanted.name)
                yield wanted.name, copied.tensor, copied.sha256

        return self._keep(order.operation_id, arrivals(), loader=order.loader)

    def receive_broadcast(self, order: ReceiveBroadcast, *, pace: Pace) -> tuple[ReceivedTensor, ...]:
        """Take tensors that a member of a group broadcasts; a group that fails at it is left.

        Raises:
            UnknownGroup: this engine is in no such group.
            BadRequest: it was joined to send.
            GroupFailed: the sender is gone, sends something else, or took too long.
            UnknownLoader: the named loader is not allowed.
            ChecksFailed: a value is not finite.
        """
        self.loaders.find(order.loader)  # before anybody waits for it
        group = self.groups.receiver(order.group)
        tensors = empty_tensors(order.tensors, device=group.device)
        size = sum(tensor.nbytes for tensor in tensors)
        bucket = torch.empty(size, dtype=torch.uint8, device=group.device) if order.flattened else None
        carried = tensors if bucket is None else [bucket]
        try:
            group.broadcast(carried, root=order.root, seconds=order.seconds, pace=pace)
        except ModelswapError:
            self.groups.discard(order.group)
            raise
        if bucket is not None:
            unflatten(bucket, tensors)
        arrivals = (_finite(spec.name, tensor) for spec, tensor in zip(order.tensors, tensors, strict=True))
        return self._keep(order.operation_id, arrivals, loader=order.loader)

    def _keep(self, operation_id: str, arrivals: Iterable[Arrival], *, loader: str) -> tuple[ReceivedTensor, ...]:
        convert = self.loaders.find(loader)
        if convert is not None:
            made = converted(convert, loader, ((name, tensor) for name, tensor, _ in arrivals))
            arrivals = (_finite(name, tensor.contiguous()) for name, tensor in made)
        whole = list(arrivals)  # all of it or nothing: a part that breaks off leaves what was sent before as it was
        received = tuple(_described(*arrival) for arrival in whole)
        session = self.get_inbox().open(operation_id)
        for arrival in whole:
            session.put(*arrival)
        return received


def _finite(name: str, tensor: torch.Tensor) -> Arrival:
    check_finite(name, tensor)
    return name, tensor, sha256_of(tensor)


def _described(name: str, tensor: torch.Tensor, sha256: str) -> ReceivedTensor:
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise UnsupportedFormat(f"tensor {name}: {tensor.dtype} has no place in a checkpoint", details={"tensor": name})
    return ReceivedTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), nbytes=tensor.nbytes, sha256=sha256)
