"""What one rank does for each transfer order: in by the receiver, out by the exporter, through the groups it is in.

What goes out the first rank of a replica gives out; the others of a split model give their slices to it. Groups belong
to the process: they outlive the model, which may be loaded anew between two updates.
"""

import contextlib
from collections.abc import Callable, Iterator

from modelswap_engine.backends.embedded.rank import Rank
from modelswap_engine.backends.embedded.transfer.gathering import Gathered, give, refuse
from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.backends.transfer import (
    FillMemory,
    FlushCache,
    JoinGroup,
    LeaveGroup,
    Outgoing,
    Reading,
    ReadTensor,
    ReceiveBroadcast,
    ReceiveFiles,
    SendBroadcast,
    TransferOrder,
    TransferReply,
    WriteFile,
)
from modelswap_engine.weights.export.exporter import WeightExporter, names_in
from modelswap_engine.weights.export.view import Whole
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.transfer.groups import Groups
from modelswap_engine.weights.transfer.loaders import WeightLoaders
from modelswap_engine.weights.transfer.receiver import WeightReceiver


class RankTransfers:
    """The transfers of one rank.

    Args:
        rank: whose model it is that gives and takes.
        flush: empties the cache of keys and values; returns how many running requests were affected.
    """

    def __init__(self, rank: Rank, *, flush: Callable[[RequestPolicy], int]) -> None:
        self._rank = rank
        self._flush = flush
        self._groups = Groups(rank.number, alone=rank.settings.ranks == 1)
        self._receiver = WeightReceiver(
            get_inbox=lambda: rank.loaded().updater.inbox,
            loaders=WeightLoaders(rank.settings.weight_loaders),
            groups=self._groups,
        )

    def carry_out(self, order: TransferOrder, *, pace: Pace) -> TransferReply:
        """Do what an order says, until ``pace`` is cancelled.

        Raises:
            ModelswapError: it could not be done.
            TeamBrokenError: the ranks of a split model lost each other.
        """
        if isinstance(order, Outgoing):
            reading = self._give_out(order, pace=pace)
            return TransferReply(rank=self._rank.number, boot_id=self._rank.boot_id, reading=reading)
        pace.spend(0)
        reply = TransferReply(rank=self._rank.number, boot_id=self._rank.boot_id)
        match order:
            case ReceiveFiles():
                received = self._receiver.receive_files(order, pace=pace)
                return TransferReply(rank=self._rank.number, boot_id=self._rank.boot_id, received=received)
            case ReceiveBroadcast():
                received = self._receiver.receive_broadcast(order, pace=pace)
                return TransferReply(rank=self._rank.number, boot_id=self._rank.boot_id, received=received)
            case JoinGroup():
                self._groups.join(order)
            case LeaveGroup(group=group):
                self._groups.leave(group)
            case FlushCache(policy=policy):
                return TransferReply(rank=self._rank.number, boot_id=self._rank.boot_id, requests=self._flush(policy))
        return reply

    def _give_out(self, order: Outgoing, *, pace: Pace) -> Reading | None:
        with self._whole(order, pace=pace) as view:
            if view is None:
                return None
            exporter = WeightExporter(get_view=lambda: view, groups=self._groups)
            match order:
                case WriteFile():
                    exporter.write(order, pace=pace)
                case FillMemory():
                    exporter.fill(order, pace=pace)
                case SendBroadcast():
                    exporter.send(order, pace=pace)
                case ReadTensor():
                    return exporter.read(order)
        return None

    @contextlib.contextmanager
    def _whole(self, order: Outgoing, *, pace: Pace) -> Iterator[Whole | None]:
        """Offer whole tensors; None on a rank that has only given its slices away, which is done then."""
        team = self._rank.team
        if team is None:
            pace.spend(0)
            yield self._rank.loaded().updater.view()
            return
        names = names_in(order)
        try:
            view = self._rank.loaded().updater.view()
        except Exception:
            if names:
                refuse(team)
            raise
        if team.index:
            give(view, names, team, pace=pace)
            yield None
            return
        gathered = Gathered(view, names, team, pace=pace)
        try:
            yield gathered
        finally:
            gathered.stop()
