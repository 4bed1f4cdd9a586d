"""Stages, commits, verifies and takes back versions of a live module.

The states are: live; live + staged; live + staged + change (prepared); then, after a commit, live (new) + previous
(old). It is driven by one thread at a time; only :meth:`WeightUpdater.snapshot` may be called from another one. That
nothing computes with the module during :meth:`commit` and :meth:`rollback` is the caller's promise.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from modelswap_engine.backends.port import RuntimeHash, Stage, StageRetained, TensorRange
from modelswap_engine.protocol.errors import Busy, IncompatibleModel, Internal, NotFound
from modelswap_engine.weights.assembly import Assembly
from modelswap_engine.weights.export.view import CheckpointView
from modelswap_engine.weights.live import LiveTable
from modelswap_engine.weights.mapping import Group, Layout, Loader
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.packed import Unpacking
from modelswap_engine.weights.place import HOST, Place
from modelswap_engine.weights.proof import Known, Proof
from modelswap_engine.weights.reader import dtype_of
from modelswap_engine.weights.sizes import Sizes, sizes_of
from modelswap_engine.weights.stage import same_bytes
from modelswap_engine.weights.transfer.inbox import Inbox
from modelswap_engine.weights.version import Change, Method, Staged, Version, plan_change


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The live tensors of one moment by runtime name; they stay what they are when pointers move on.

    To look at one that is packed means to work it out, see :class:`~modelswap_engine.weights.packed.Packed`.
    """

    digest: str
    tensors: Mapping[str, torch.Tensor]


def meta_tensors(checkpoint: Sequence[TensorRange]) -> dict[str, torch.Tensor]:
    """Return shapes and dtypes of a checkpoint as tensors without memory."""
    return {item.name: torch.empty(item.shape, dtype=dtype_of(item), device="meta") for item in checkpoint}


class WeightUpdater:
    """The versions of one module.

    Args:
        module: holds the live version already; or the table of what it holds.
        loader: the engine's rules for this module.
        digest: of the live version.
        checkpoint: all tensors of the live version.
        slices: hashes of what this process holds of tensors that are split over several, of the live version.
        midway: called after the first pointer of a commit has moved; tests break off here.
        threads: how many read and hash at a time; 0 means one per usable core.
        method: asked with each preparation how tensors must become live.
        place: where the module's tensors lie.
    """

    def __init__(
        self,
        module: torch.nn.Module | LiveTable,
        loader: Loader,
        *,
        digest: str,
        checkpoint: Sequence[TensorRange],
        slices: Mapping[str, str] | None = None,
        midway: Callable[[], None] = lambda: None,
        threads: int = 0,
        method: Callable[[], Method] = lambda: Method.POINTER,
        place: Place = HOST,
    ) -> None:
        self._table = module if isinstance(module, LiveTable) else LiveTable(module)
        self._midway = midway
        self._method = method
        self._place = place
        self._layout = layout = Layout.of(self._table, loader, meta_tensors(checkpoint))
        self.groups = layout.groups
        known = Known({item.name: item.sha256 for item in checkpoint}, dict(slices or {}))
        self._proof = Proof(layout.groups, loader, layout.shapes, known, threads=threads, place=place)
        self._lock = threading.Lock()
        self._digest = digest
        self._expected = self._table.pointers()
        self._previous: Version | None = None
        self._staged: Staged | None = None
        self._prepared: Change | None = None
        self._applied: Change | None = None
        self._committed = ""
        self._written: Mapping[str, torch.Tensor] = {}
        self.inbox = Inbox()
        self._assembly = Assembly(
            layout, proof=self._proof, inbox=self.inbox, view=self.view, threads=threads, place=place
        )

    @property
    def digest(self) -> str:
        """The digest of the live version."""
        return self._digest

    @property
    def unverifiable(self) -> frozenset[str]:
        """Checkpoint tensors whose bytes cannot be had back from the live ones."""
        return self._proof.blind

    def prove(self) -> int:
        """Hash all live tensors against the version's manifest, after a load; return the bytes hashed.

        A tensor that went through an inexact conversion is ``unverifiable``: from now on the parameter that was made
        of it is known by its own hash.

        Raises:
            ManifestMismatch: a tensor that the engine holds as it is in the checkpoint has other bytes.
        """
        return self._proof.calibrate(self.snapshot().tensors)

    def answers(self, found: Mapping[str, str]) -> dict[str, str]:
        """Return hashes of live tensors as they are compared with a manifest; see :meth:`Proof.answers`."""
        return self._proof.answers(found)

    def stage(self, order: Stage, read: Callable[[Callable[[Pace], Staged]], Staged]) -> Staged:
        """Read, prove and lay out the tensors of an order beside the live ones.

        From here on the commit before this one can only be taken back by staging the retained version.

        Args:
            order: what to stage.
            read: runs the reading. It may do so in another thread and leave that behind when it raises: the reading
                changes nothing here, only its result counts.

        Raises:
            ModelswapError: see :mod:`~modelswap_engine.weights.reader` and :mod:`~modelswap_engine.weights.stage`.
        """
        return self.accept(read(self.begin(order)))

    def begin(self, order: Stage) -> Callable[[Pace], Staged]:
        """Make room for what is to be staged and return the reading, which any thread may do; see :meth:`accept`."""
        self._make_room(drop_previous=order.drop_previous)
        return functools.partial(self._assembly.read, order)

    def accept(self, staged: Staged) -> Staged:
        """Take what a reading found as the staged version."""
        self._staged = staged
        return staged

    def _make_room(self, *, drop_previous: bool) -> None:
        # The undo of the last commit holds two versions; beside a third one that is too much memory.
        self._staged, self._prepared, self._applied, self._written = None, None, None, {}
        if drop_previous:
            self._previous = None

    def view(self) -> CheckpointView:
        """Return the live tensors of this moment as checkpoint tensors; safe beside a commit."""
        with self._lock:
            tensors, hashes, digest = self._live(), dict(self._proof.whole), self._digest
        layout = self._layout
        return CheckpointView(
            layout.loader, layout.home, layout.shapes, tensors, hashes=hashes, digest=digest, place=self._place
        )

    def stage_retained(self, order: StageRetained) -> Staged:
        """Stage the retained previous version; nothing is read.

        Raises:
            NotFound: no such version is retained.
        """
        self._make_room(drop_previous=False)
        if self._previous is None or self._previous.digest != order.digest:
            held = self._previous.digest if self._previous else "nothing"
            raise NotFound(
                f"version {order.digest} is not retained in memory ({held} is)",
                advice="swap to it from its source",
                details={"digest": order.digest},
            )
        self._staged = Staged(order.operation_id, self._previous, keep_previous=True, retained=True)
        return self._staged

    def staged(self, operation_id: str) -> Staged:
        """Return what is staged for an operation.

        Raises:
            NotFound: nothing is.
        """
        staged = self._staged
        if staged is None or staged.operation_id != operation_id:
            raise NotFound(f"nothing is staged for operation {operation_id}", advice="stage it again")
        return staged

    def prepare(self, operation_id: str, *, method: Method | None = None) -> str:
        """Work out the commit and its inverse; return the staged digest. Afterwards a commit only assigns.

        Args:
            operation_id: what is staged for it is prepared.
            method: how it must become live, instead of how it usually does.

        Raises:
            NotFound: nothing is staged for the operation.
            IncompatibleModel: a staged tensor does not fit the memory it replaces.
        """
        staged = self.staged(operation_id)
        for name, tensor in staged.version.tensors.items():
            if self._table.check(name, tensor) is not tensor:
                raise IncompatibleModel(f"staged tensor {name} is not in runtime layout", details={"tensor": name})
        self._prepared = plan_change(
            self._table,
            staged,
            method=method or self._method(),
            digest=self._digest,
            known=self._proof.of(staged.version.known),
            older=self._previous,
        )
        return staged.version.digest

    def commit(self, operation_id: str) -> Method:
        """Make the staged version live, and say how. If it raises, :meth:`rollback` still restores all of it.

        Raises:
            NotFound: the operation is not prepared.
        """
        change = self._prepared
        if change is None or change.staged.operation_id != operation_id:
            raise NotFound(f"operation {operation_id} is not prepared", advice="prepare it again")
        with self._lock:
            self._prepared, self._applied, self._committed = None, change, operation_id
            change.apply(change.forward, self._midway)
            self._take(change, change.staged.version, change.after)
            self._previous, self._staged = change.old, None
        return change.method

    def rollback(self, operation_id: str) -> Method | None:
        """Put back what was live before the operation's commit, and say how; None when there was nothing to do.

        Raises:
            Busy: the commit can no longer be undone: it was released, or another one came after it.
        """
        if self._staged is not None and self._staged.operation_id == operation_id and self._committed != operation_id:
            return None
        change = self._applied
        if change is None or change.staged.operation_id != operation_id:
            if change is None and self._committed != operation_id:
                return None
            raise Busy(
                f"the commit of operation {operation_id} can no longer be undone",
                advice="load the wanted version",
                details={"operation": operation_id},
            )
        with self._lock:
            change.apply(change.backward)
            self._take(change, change.old, change.before)
            self._previous, self._staged, self._applied = change.older, change.staged, None
            self._committed = ""
        return change.method

    def _take(self, change: Change, version: Version, pointers: Mapping[str, tuple[int, ...]]) -> None:
        self._expected.update(pointers)
        self._proof.take(version.known)
        self._digest = version.digest
        self._written = version.tensors if change.method is Method.COPY else {}

    def verify(self, *, strict: bool, pace: Pace | None = None) -> str:
        """Prove that every live pointer is the expected one, with ``strict`` every byte; return the live digest.

        What was copied is compared where it lies, byte for byte.

        Raises:
            Cancelled: ``pace`` was cancelled.
            Internal: a parameter points elsewhere, or does not hold what was copied into it.
            ManifestMismatch: a live tensor has other bytes than the version's manifest says.
        """
        actual = self._table.pointers()
        moved = [name for name, pointers in self._expected.items() if actual[name] != pointers]
        if moved:
            raise Internal(
                f"parameter {moved[0]} is not the one that was staged (and {len(moved) - 1} more)",
                advice="the worker rolls back; if that fails, restart it",
                details={"tensor": moved[0]},
            )
        strange = [name for name, cell in self._table.cells.items() if not cell.intact]
        if strange:
            raise Internal(
                f"what the engine computes with for {strange[0]} is not what was staged (and {len(strange) - 1} more)",
                advice="something else loads weights into this engine; restart it on the wanted version",
                details={"tensor": strange[0]},
            )
        for name, tensor in self._written.items():
            if not same_bytes(self._table.slot_of(name).tensor, tensor):
                raise Internal(
                    f"parameter {name} does not hold what was copied into it",
                    advice="the worker rolls back; look for damaged memory if it happens again",
                    details={"tensor": name},
                )
        if strict:
            self._proof.require(self.snapshot().tensors, pace=pace)
        return self._digest

    def release(self, operation_id: str, *, previous: bool) -> None:
        """Drop what is staged for the operation and the means to undo it; with ``previous`` the retained version too.

        A version that its order did not want to keep goes as well.
        """
        self.inbox.forget(operation_id)
        if self._staged is not None and self._staged.operation_id == operation_id:
            self._staged, self._prepared = None, None
        applied, self._applied, self._written = self._applied, None, {}
        if previous or (applied is not None and not applied.staged.keep_previous):
            self._previous = None

    def would_be(self, version: Version) -> dict[str, torch.Tensor]:
        """Return the tensors of a version under every name that they will have in the module."""
        return {name: tensor for slot, tensor in version.tensors.items() for name in self._table.slot_of(slot).names}

    def clear(self) -> None:
        """Hold nothing but the live version, whoever staged or retained something."""
        self._staged, self._prepared, self._applied, self._previous = None, None, None, None

    def snapshot(self) -> Snapshot:
        """Return the live tensors of this moment; safe beside a commit."""
        with self._lock:
            return Snapshot(digest=self._digest, tensors=self._live())

    def _live(self) -> Mapping[str, torch.Tensor]:
        tensors = {name: slot.tensor for slot in self._table.slots.values() for name in slot.names}
        packed = {name: cell.live for name, cell in self._table.cells.items()}
        return Unpacking(tensors, packed) if packed else tensors

    def hash(
        self, snapshot: Snapshot, groups: Sequence[Group], *, pace: Pace | None = None
    ) -> tuple[dict[str, str], int]:
        """Return name → sha256 of a snapshot in checkpoint coordinates, and the bytes hashed.

        Raises:
            Cancelled: ``pace`` was cancelled.
        """
        return self._proof.hash(snapshot.tensors, groups, pace=pace)

    def runtime(
        self, snapshot: Snapshot, groups: Sequence[Group], *, pace: Pace | None = None
    ) -> tuple[RuntimeHash, ...]:
        """Return the hashes of a snapshot in runtime coordinates, of what cannot be had back in checkpoint coordinates.

        Raises:
            Cancelled: ``pace`` was cancelled.
        """
        return self._proof.runtime(snapshot.tensors, groups, pace=pace)

    def sizes(self) -> Sizes:
        """Return what the versions hold in bytes; safe beside a change."""
        # Read once: another thread may be in the middle of a change.
        previous, staged, prepared, applied = self._previous, self._staged, self._prepared, self._applied
        return sizes_of(
            self._table, previous=previous, staged=staged, prepared=prepared, applied=applied, arrived=self.inbox
        )
