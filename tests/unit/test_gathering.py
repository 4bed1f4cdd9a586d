"""Slices of two ranks become whole tensors, and neither waits for a rank that takes no part. Each rank is a thread."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from modelswap_engine.backends.embedded.transfer.gathering import Gathered, give, refuse
from modelswap_engine.protocol.errors import Cancelled, IncompatibleModel, ManifestMismatch, ModelswapError, PeerFailed
from modelswap_engine.weights.export.view import Extract
from modelswap_engine.weights.hashing import sha256_of
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.place import HOST

SECONDS = 20.0
WHOLE = {
    "rows": torch.arange(24, dtype=torch.float32).reshape(6, 4),
    "columns": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
    "striped": torch.arange(32, dtype=torch.float32).reshape(8, 4).to(torch.float8_e4m3fn),
    "both": torch.ones(3),
}
PLACES = {"rows": (0, [[0, 1, 2], [3, 4, 5]]), "columns": (1, [[0, 1, 2, 3], [4, 5]]),
          "striped": (0, [[0, 1, 4, 5], [2, 3, 6, 7]])}  # fmt: skip


class Wire:
    """What two threads exchange: each call of one meets the same call of the other, or fails."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=SECONDS)
        self.words: list[list[int]] = [[], []]
        self.shared: list[torch.Tensor | None] = [None, None]


class Rank:
    """Stands in for a team, as one of its ranks."""

    size = 2

    def __init__(self, wire: Wire, index: int) -> None:
        self.index = index
        self._wire = wire

    def highest(self, words: list[int], what: str) -> list[int]:
        self._wire.words[self.index] = words
        self._wire.barrier.wait()
        found = [max(pair) for pair in zip(*self._wire.words, strict=True)]
        self._wire.barrier.wait()
        return found

    def share(self, tensor: torch.Tensor, *, source: int, what: str) -> None:
        self._wire.shared[self.index] = tensor
        self._wire.barrier.wait()
        given = self._wire.shared[source]
        assert given is not None
        assert given.shape == tensor.shape
        if self.index != source:
            tensor.copy_(given)
        self._wire.barrier.wait()


class View:
    """What a rank holds; it may have changed there."""

    place = HOST

    def __init__(self, index: int, *, digest: str = "v1") -> None:
        self.index, self.digest = index, digest
        self.hashes = {name: sha256_of(tensor) for name, tensor in WHOLE.items()}
        self.changed: set[str] = set()
        self.lost: set[str] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(WHOLE[name].shape)

    def extract(self, name: str) -> Extract:
        if name in self.lost:
            raise IncompatibleModel(f"{name} cannot be had back")
        if name not in PLACES:
            return Extract(WHOLE[name], None, torch.empty(0, dtype=torch.int64))
        dim, positions = PLACES[name][0], torch.tensor(PLACES[name][1][self.index])
        plain = torch.uint8 if WHOLE[name].itemsize == 1 else WHOLE[name].dtype
        part = WHOLE[name].view(plain).index_select(dim, positions).clone()
        if name in self.changed:
            part.view(torch.uint8)[0, 0] ^= 1
        return Extract(part.view(WHOLE[name].dtype), dim, positions)


def both(
    names: Sequence[str],
    views: Sequence[View],
    paces: Sequence[Pace],
    *,
    follow: Callable[[Any, Any, Pace], None] | None = None,
) -> tuple[dict[str, torch.Tensor], list[type[ModelswapError] | None]]:
    """Run both ranks; return what the first one got, and how each of them ended."""
    wire, got = Wire(), dict[str, torch.Tensor]()
    teams: list[Any] = [Rank(wire, 0), Rank(wire, 1)]
    held: list[Any] = list(views)

    def lead() -> None:
        gathered = Gathered(held[0], names, teams[0], pace=paces[0])
        try:
            for name in names:
                got[name] = gathered.tensor(name).clone()
        finally:
            gathered.stop()

    def other() -> None:
        if follow is not None:
            follow(held[1], teams[1], paces[1])
        else:
            give(held[1], names, teams[1], pace=paces[1])

    def ended(work: Callable[[], None]) -> type[ModelswapError] | None:
        try:
            work()
        except ModelswapError as error:
            return type(error)
        return None

    with ThreadPoolExecutor(2) as pool:
        return got, list(pool.map(ended, (lead, other)))


def cancelled() -> Pace:
    pace = Pace()
    pace.cancel()
    return pace


def test_every_cut_is_put_together_again() -> None:
    got, ends = both(list(WHOLE), [View(0), View(1)], [Pace(), Pace()])
    assert ends == [None, None]
    assert {name: sha256_of(tensor) for name, tensor in got.items()} == View(0).hashes


@pytest.mark.parametrize("who", [0, 1])
def test_one_that_is_called_off_ends_it_for_both(who: int) -> None:
    _, ends = both(list(WHOLE), [View(0), View(1)], [cancelled() if rank == who else Pace() for rank in range(2)])
    assert ends == [Cancelled if rank == who else PeerFailed for rank in range(2)]
    assert both(list(WHOLE), [View(0), View(1)], [cancelled(), cancelled()])[1] == [Cancelled, Cancelled]


@pytest.mark.parametrize("who", [0, 1])
def test_one_that_cannot_have_a_tensor_back_ends_it_in_the_middle(who: int) -> None:
    views = [View(0), View(1)]
    views[who].lost = {"columns"}
    got, ends = both(list(WHOLE), views, [Pace(), Pace()])
    assert list(got) == ["rows"]
    assert ends == [IncompatibleModel if rank == who else PeerFailed for rank in range(2)]


@pytest.mark.parametrize("who", [0, 1])
def test_bytes_that_have_changed_do_not_leave(who: int) -> None:
    views = [View(0), View(1)]
    views[who].changed = {"columns"}
    got, ends = both(list(WHOLE), views, [Pace(), Pace()])
    assert list(got) == ["rows"]
    assert ends == [ManifestMismatch, PeerFailed]


def test_ranks_of_different_versions_give_nothing() -> None:
    got, ends = both(list(WHOLE), [View(0), View(1, digest="v2")], [Pace(), Pace()])
    assert (got, ends) == ({}, [PeerFailed, PeerFailed])


def test_a_rank_without_a_model_says_so() -> None:
    _, ends = both(list(WHOLE), [View(0), View(1)], [Pace(), Pace()], follow=lambda view, team, pace: refuse(team))
    assert ends == [PeerFailed, None]
