"""Whole checkpoint tensors of a model that is split over ranks: the first rank asks, all give what they hold.

Before each tensor the ranks settle whether all of them go on, with which tensor of which version; so one that fails or
is called off ends it for all, and none is left waiting. Slices travel in pieces, and only the first rank ever has a
whole tensor, one at a time. What it puts together is believed for its hash alone.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Final

import torch

from modelswap_engine.backends.embedded.team import Team
from modelswap_engine.protocol.errors import Internal, ManifestMismatch, PeerFailed
from modelswap_engine.weights.export.view import CheckpointView, Extract
from modelswap_engine.weights.hashing import sha256_of
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.place import HOST, flat

_PIECE: Final = 16 << 20
_PLAIN: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADVICE: Final = "see the answer of that rank for the reason"


class Gathered:
    """The whole tensors, on the first rank; one that fails must :meth:`stop` the others.

    Args:
        view: what this rank holds.
        names: the tensors that will be asked for, in this order.
        team: the other ranks.
        pace: can call it off.
    """

    place = HOST

    def __init__(self, view: CheckpointView, names: Sequence[str], team: Team, *, pace: Pace) -> None:
        self._view = view
        self._left = list(names)
        self._team = team
        self._pace = pace

    def tensor(self, name: str) -> torch.Tensor:
        """Return one checkpoint tensor, put together on the host.

        Raises:
            PeerFailed: another rank did not give its part.
            ManifestMismatch: the parts together are not the version's tensor.
            IncompatibleModel: it cannot be had back.
            TeamBrokenError: the ranks lost each other.
        """
        self._pace.spend(0)
        if not self._left or self._left[0] != name:
            raise Internal(f"tensor {name} was not announced to the other ranks")
        mine = self._view.extract(name)
        rest, self._left = self._left[1:], []  # where this exchange fails nobody waits any more
        _go_on(self._team, self._view, name, mine)
        whole = self._put_together(name, mine)
        self._left = rest
        if sha256_of(whole) != self._view.hashes[name]:
            raise ManifestMismatch(
                f"tensor {name}: what the ranks of this model hold together is not what the version says",
                advice="check the live tensors (modelswap check)",
                details={"tensor": name},
            )
        return whole

    def _put_together(self, name: str, mine: Extract) -> torch.Tensor:
        with self._view.place.beside():
            own = mine.tensor.cpu().contiguous()
        if mine.dim is None:
            return own
        whole = torch.empty(self._view.shape(name), dtype=own.dtype)
        _lay(whole, mine.dim, mine.positions, own)
        for peer in range(1, self._team.size):
            positions = torch.empty(self._team.highest([0], name)[0], dtype=torch.int64)
            self._team.share(positions, source=peer, what=name)
            shape = list(own.shape)
            shape[mine.dim] = len(positions)
            part = torch.empty(shape, dtype=own.dtype)
            for piece in torch.split(flat(part), _PIECE):
                self._team.share(piece, source=peer, what=name)
            _lay(whole, mine.dim, positions, part)
        return whole

    def stop(self) -> None:
        """Let the others go, if they still wait for more to be asked."""
        if self._left:
            self._left.clear()
            self._team.highest([1, 0, 0], "ending an export")


def _lay(whole: torch.Tensor, dim: int, positions: torch.Tensor, part: torch.Tensor) -> None:
    plain = _PLAIN[whole.itemsize]  # not every dtype can be laid somewhere, and bytes are bytes
    whole.view(plain).index_copy_(dim, positions, part.view(plain))


def give(view: CheckpointView, names: Sequence[str], team: Team, *, pace: Pace) -> None:
    """Give what this rank holds of some tensors to the first one, as that asks for them.

    Raises:
        PeerFailed: the first rank ended it.
        IncompatibleModel: a tensor cannot be had back.
        Cancelled: ``pace`` was cancelled.
        TeamBrokenError: the ranks lost each other.
    """
    for name in names:
        try:
            pace.spend(0)
            mine = view.extract(name)
        except Exception:
            refuse(team)
            raise
        _go_on(team, view, name, mine)
        if mine.dim is not None:
            _give(view, name, mine, mine.dim, team)


def _give(view: CheckpointView, name: str, mine: Extract, dim: int, team: Team) -> None:
    with view.place.beside():
        part = flat(mine.tensor.cpu())
    shape = view.shape(name)
    each = math.prod(shape) * mine.tensor.itemsize // shape[dim]  # bytes at one position
    for peer in range(1, team.size):
        here = peer == team.index
        count = team.highest([len(mine.positions) if here else 0], name)[0]
        positions = mine.positions if here else torch.empty(count, dtype=torch.int64)
        team.share(positions, source=peer, what=name)
        for piece in torch.split(part if here else torch.empty(each * count, dtype=torch.uint8), _PIECE):
            team.share(piece, source=peer, what=name)


def refuse(team: Team) -> None:
    """Tell the others that this rank takes no part; they wait for its word before the next tensor."""
    team.highest([1, 0, 0], "ending an export")


def _go_on(team: Team, view: CheckpointView, name: str, mine: Extract) -> None:
    mark = zlib.crc32(f"{view.digest} {mine.dim} {name}".encode())
    stopped, most, least = team.highest([0, mark, -mark], name)
    if stopped:
        raise PeerFailed("another rank of this model gave no weights out", advice=_ADVICE)
    if most != -least:
        raise PeerFailed("the ranks of this model do not hold one version just now", advice="try again")
