"""Makes the tensors of a version, in runtime layout, of what its order names: files, what a trainer sent, what is live.

It changes nothing that is live or staged: any thread may do it, and a reading that is given up leaves nothing behind.
"""

import functools
from collections.abc import Callable

import torch

from modelswap_engine.backends.port import Stage, TensorRange
from modelswap_engine.weights.export.view import CheckpointView
from modelswap_engine.weights.hashing import sha256_of
from modelswap_engine.weights.mapping import Layout
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.packed import Packed
from modelswap_engine.weights.place import Place
from modelswap_engine.weights.proof import Known, Proof
from modelswap_engine.weights.reader import check_hash, read_tensor
from modelswap_engine.weights.stage import build_groups, touched_groups
from modelswap_engine.weights.transfer.inbox import Held, Inbox
from modelswap_engine.weights.version import Staged, Version


class Assembly:
    """Reads versions for one module.

    Args:
        layout: how the checkpoint's tensors lie in it.
        proof: how live tensors are hashed.
        inbox: what a trainer has sent.
        view: returns the live tensors of the moment as checkpoint tensors.
        threads: how many read and hash at a time.
        place: where tensors are to lie.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        proof: Proof,
        inbox: Inbox,
        view: Callable[[], CheckpointView],
        threads: int,
        place: Place,
    ) -> None:
        self._layout = layout
        self._proof = proof
        self._inbox = inbox
        self._view = view
        self._threads = threads
        self._place = place

    def read(self, order: Stage, pace: Pace) -> Staged:
        """Read, prove and lay out the tensors of an order.

        Raises:
            ModelswapError: see :mod:`~modelswap_engine.weights.reader` and :mod:`~modelswap_engine.weights.stage`.
        """
        layout = self._layout
        touched = touched_groups(order.tensors, layout.home, layout.shapes)
        fetch = functools.partial(self._fetch, order.operation_id)
        made, slices = build_groups(
            touched, layout.loader, layout.table, pace=pace, threads=self._threads, fetch=fetch, place=self._place
        )
        read = [member for _, members in touched for member in members]
        known = Known(
            whole={member.name: member.sha256 for member in read},
            slices=slices,
            converted=self._proof.hash_converted(made, (group for group, _ in touched)),
        )
        version = Version(
            digest=order.digest,
            tensors={slot: value for slot, value in made.items() if not isinstance(value, Packed)},
            known=known,
            packed={cell: value for cell, value in made.items() if isinstance(value, Packed)},
        )
        fetched = sum(member.nbytes for member in read if member.path)
        return Staged(order.operation_id, version, order.keep_previous, fetched_bytes=fetched)

    def _fetch(self, operation_id: str, wanted: TensorRange, *, pace: Pace) -> torch.Tensor:
        if wanted.path:
            return read_tensor(wanted, pace=pace, place=self._place)
        held = self._inbox.take(operation_id, wanted.name)
        if held is None:  # the part of a fused parameter that nobody sent; of a split model, this process's slice of it
            tensor = self._view().held(wanted.name)
            found = self._proof.answers({wanted.name: sha256_of(tensor, self._place)})
            held = Held(tensor, found[wanted.name])
        check_hash(wanted, held.sha256)
        with self._place.beside():
            return held.tensor.to(self._place.device)
