"""Weights on a device of their own: pieces through a few buffers, and never a byte that had not arrived."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelswap_engine.protocol.errors import DeviceUnavailable, InsufficientMemory, ManifestMismatch

pytestmark = pytest.mark.model

_PIECE, _THREADS = 8, 2
_GROUPS = (("embed",), ("q", "k", "v"), ("gate_up",), ("out",), ("scale",), ("norm",), ("steps",))


class _World:
    """A module on a late device, and the version it should hold."""

    def __init__(self, folder: Path, **options: int) -> None:
        from modelswap_engine.weights.place import OnDevice
        from modelswap_engine.weights.updater import WeightUpdater
        from tests.support import weights_lab as lab
        from tests.support.late_copies import LateCopies

        self.lab, self.folder, self.numbers = lab, folder, itertools.count()
        self.copies = LateCopies(**options)
        self.live = self.write(lab.random_tensors(1, lab.SOURCES))
        self.module = lab.fill(lab.LabModule(), self.live)
        self.updater = WeightUpdater(
            self.module,
            lab.LabLoader(),
            digest=self.live.digest,
            checkpoint=self.live.ranges,
            threads=_THREADS,
            place=OnDevice(self.copies, piece=_PIECE),
        )

    def write(self, tensors):
        return self.lab.write_version(self.folder / f"{next(self.numbers)}.bin", tensors)

    def swap(self, groups, seed: int) -> None:
        from modelswap_engine.weights.pace import Pace

        names = [name for group in groups for name in group]
        version = self.write({**self.live.tensors, **self.lab.random_tensors(seed, names)})
        operation = f"op{next(self.numbers)}"
        self.updater.stage(version.order(operation, names), lambda read: read(Pace()))
        assert self.copies.settled
        self.updater.prepare(operation)
        self.updater.commit(operation)
        self.live = version

    def holds(self) -> bool:
        fresh = self.lab.fill(self.lab.LabModule(), self.live)
        return self.lab.state_bytes(self.module.state_dict()) == self.lab.state_bytes(fresh.state_dict())


@settings(max_examples=30, deadline=None)
@given(
    swaps=st.lists(
        st.tuples(st.sets(st.sampled_from(_GROUPS), min_size=1), st.integers(0, 2**31)), min_size=1, max_size=4
    )
)
def test_what_is_committed_has_arrived_and_hashes_as_it_was_read(tmp_path_factory: pytest.TempPathFactory, swaps):
    world = _World(tmp_path_factory.mktemp("lab"))
    for groups, seed in swaps:
        world.swap(groups, seed)
        # Before anything else that could wait for the device.
        assert world.holds()
        assert world.updater.verify(strict=True) == world.live.digest
    hashes, _ = world.updater.hash(world.updater.snapshot(), world.updater.groups)
    assert hashes == world.live.hashes()


@pytest.mark.parametrize("size", [0, 1, _PIECE - 1, _PIECE, _PIECE + 1, 2 * _PIECE, 7 * _PIECE + 3])
def test_pieces_come_back_in_order_whatever_the_size(size: int) -> None:
    import torch

    from modelswap_engine.weights.place import OnDevice
    from tests.support.late_copies import LateCopies

    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    pieces = OnDevice(LateCopies(), piece=_PIECE).pieces(tensor)
    assert b"".join(bytes(piece) for piece in pieces) == tensor.numpy().tobytes()


def test_host_memory_is_two_pieces_for_each_thread_however_much_is_staged(tmp_path: Path) -> None:
    world = _World(tmp_path)
    for seed in range(5):
        world.swap(_GROUPS, seed)
        world.updater.verify(strict=True)
    assert 0 < world.copies.buffers <= 2 * _THREADS


def test_damaged_bytes_are_refused_before_they_count(tmp_path: Path) -> None:
    world = _World(tmp_path)
    path = world.folder / "next.bin"
    version = world.lab.write_version(path, world.lab.random_tensors(2, world.lab.SOURCES))
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    from modelswap_engine.weights.pace import Pace

    with pytest.raises(ManifestMismatch):
        world.updater.stage(version.order("bad", world.lab.SOURCES), lambda read: read(Pace()))
    assert world.holds()


def test_a_full_device_is_a_refusal_and_the_live_version_stays(tmp_path: Path) -> None:
    world = _World(tmp_path, capacity=3)
    before = world.live
    with pytest.raises(InsufficientMemory, match=r"full: CUDA out of memory\. Tried") as refused:
        world.swap(_GROUPS, 5)
    assert "KV cache" in refused.value.advice
    assert world.live is before
    assert world.holds()


def test_auto_is_the_cpu_where_there_is_no_gpu_and_cuda_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from modelswap_engine.backends.embedded.device import name_of, place_of
    from modelswap_engine.backends.embedded.settings import Device

    place_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert name_of(place_of(Device.AUTO, rank=0)) == "cpu"
    with pytest.raises(DeviceUnavailable, match="sees 0") as none:
        place_of(Device.CUDA, rank=0)
    assert "--device cpu" in none.value.advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceUnavailable, match="rank 1") as few:
        place_of(Device.AUTO, rank=1)
    assert "fewer ranks" in few.value.advice
    assert name_of(place_of(Device.CPU, rank=1)) == "cpu"
    place_of.cache_clear()
