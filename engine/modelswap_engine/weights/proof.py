"""What the live tensors must hash to, and whether they do.

A live tensor is known in one of three ways. Most are, or can be turned back into, what the checkpoint holds: they have
the manifest's hash. A slice of a split tensor has the hash that it had when it was cut from proven bytes. Where a
conversion loses something (float32 on disk, bfloat16 live) there is no way back: the parameter is known by the hash
that it had when it was made of proven bytes, in runtime coordinates.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from modelswap_engine.backends.port import RuntimeHash
from modelswap_engine.protocol.errors import ManifestMismatch
from modelswap_engine.weights.hashing import hash_groups, hash_tensors
from modelswap_engine.weights.mapping import Group, Loader
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.packed import Packed
from modelswap_engine.weights.place import HOST, Place


@dataclasses.dataclass(frozen=True)
class Known:
    """Hashes of some tensors of a version: ``whole`` and ``slices`` by checkpoint name, ``converted`` by slot."""

    whole: Mapping[str, str]
    slices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    converted: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Proof:
    """The hashes of the live version.

    Args:
        groups: all of the model's.
        loader: the engine's rules.
        shapes: all names of the checkpoint, as tensors on the meta device.
        known: what the live tensors must hash to; nothing is known about conversions before :meth:`calibrate`.
        threads: how many hash at a time; 0 means one per usable core.
        place: where the live tensors lie.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        loader: Loader,
        shapes: Mapping[str, torch.Tensor],
        known: Known,
        *,
        threads: int = 0,
        place: Place = HOST,
    ) -> None:
        self._groups = groups
        self._loader = loader
        self._shapes = shapes
        self._threads = threads
        self._place = place
        self._whole = dict(known.whole)
        self._slices = dict(known.slices)
        self._converted: dict[str, str] = dict(known.converted)
        self._lossy: frozenset[str] = frozenset()
        read = {name for group in groups for name in group.sources}
        self._unread = frozenset(shapes) - read

    @property
    def blind(self) -> frozenset[str]:
        """Checkpoint tensors whose bytes cannot be had back: converted beyond return, or not read by the engine."""
        return self._unread | self._lossy

    @property
    def whole(self) -> Mapping[str, str]:
        """What every checkpoint tensor as a whole must hash to."""
        return self._whole

    def calibrate(self, live: Mapping[str, torch.Tensor]) -> int:
        """Find out what can be had back, from a model that was just filled with proven tensors; return bytes hashed.

        Raises:
            ManifestMismatch: a tensor that the engine holds as it is in the checkpoint has other bytes.
        """
        actual, size = self.hash(live, self._groups)
        lossy = {name for group in self._groups for name in group.sources if name not in actual}
        for group in self._groups:
            for part in group.parts:
                wrong = [name for name in part.sources if name in actual and actual[name] != self._wanted(name)]
                if wrong and len(part.sources) == 1 and len(part.targets) == 1:
                    raise self._mismatch(wrong[0], actual[wrong[0]], self._wanted(wrong[0]))
                lossy.update(wrong)
        self._lossy = frozenset(lossy)
        converted = {slot: live[slot] for slot in self.converted_slots(self._groups)}
        self._converted = hash_tensors(converted, threads=self._threads, place=self._place)
        return size + sum(tensor.nbytes for tensor in converted.values())

    def converted_slots(self, groups: Iterable[Group]) -> list[str]:
        """Return the slots of groups that are made with loss."""
        return [slot for group in groups if not self._lossy.isdisjoint(group.sources) for slot in group.slots]

    def hash_converted(self, made: Mapping[str, torch.Tensor | Packed], groups: Iterable[Group]) -> dict[str, str]:
        """Hash what was just made of proven bytes, as far as it will not be known otherwise."""
        hashes: dict[str, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        for slot in self.converted_slots(groups):
            value = made[slot]
            if isinstance(value, Packed):
                hashes[slot] = value.sha256
            else:
                tensors[slot] = value
        return hashes | hash_tensors(tensors, threads=self._threads, place=self._place)

    def hash(
        self, live: Mapping[str, torch.Tensor], groups: Sequence[Group], *, pace: Pace | None = None
    ) -> tuple[dict[str, str], int]:
        """Return name → sha256 in checkpoint coordinates, of what can be had back or nearly so, and the bytes hashed.

        Raises:
            Cancelled: ``pace`` was cancelled.
        """
        return hash_groups(
            groups, self._loader, live, self._shapes, pace=pace or Pace(), threads=self._threads, place=self._place
        )

    def runtime(
        self, live: Mapping[str, torch.Tensor], groups: Sequence[Group], *, pace: Pace | None = None
    ) -> tuple[RuntimeHash, ...]:
        """Hash in runtime coordinates what cannot be had back.

        Raises:
            Cancelled: ``pace`` was cancelled.
        """
        sources = {slot: group.sources for group in groups for slot in group.slots}
        wanted = {slot: live[slot] for slot in self.converted_slots(groups)}
        found = hash_tensors(wanted, pace=pace or Pace(), threads=self._threads, place=self._place)
        return tuple(
            RuntimeHash(name=slot, sources=sources[slot], expected=self._converted[slot], actual=actual)
            for slot, actual in sorted(found.items())
        )

    def answers(self, found: Mapping[str, str]) -> dict[str, str]:
        """Return hashes of live tensors as they are compared with a manifest.

        A slice has no hash of its own there: one that is right answers with the hash of the whole tensor that it was
        cut from, a wrong one with its own.
        """
        return {name: self._whole[name] if value == self._slices.get(name) else value for name, value in found.items()}

    def require(self, live: Mapping[str, torch.Tensor], *, pace: Pace | None = None) -> None:
        """Hash everything.

        Raises:
            Cancelled: ``pace`` was cancelled.
            ManifestMismatch: a live tensor has other bytes than it must have.
        """
        hashes, _ = self.hash(live, self._groups, pace=pace)
        for name in sorted(hashes.keys() - self.blind):
            if hashes[name] != self._wanted(name):
                raise self._mismatch(name, hashes[name], self._wanted(name))
        for item in self.runtime(live, self._groups, pace=pace):
            if item.actual != item.expected:
                raise self._mismatch(item.name, item.actual, item.expected)

    def take(self, known: Known) -> None:
        """Some tensors are others now."""
        self._whole.update(known.whole)
        self._slices.update(known.slices)
        self._converted.update(known.converted)

    def of(self, known: Known) -> Known:
        """Return what the same tensors hash to in the live version."""
        return Known(
            whole={name: self._whole[name] for name in known.whole},
            slices={name: self._slices[name] for name in known.slices},
            converted={slot: self._converted[slot] for slot in known.converted},
        )

    def _wanted(self, name: str) -> str:
        return self._slices.get(name, self._whole[name])

    def _mismatch(self, name: str, actual: str, wanted: str) -> ManifestMismatch:
        return ManifestMismatch(
            f"live tensor {name} hashes to {actual[:16]}…, the live version says {wanted[:16]}…",
            advice="the memory of the worker was changed; load the version again",
            details={"tensor": name, "expected": wanted, "actual": actual},
        )
