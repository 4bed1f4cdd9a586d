"""What one rank does for each transfer order: in by the receiver, out by the exporter, through the groups it is in.

Groups belong to the process: they outlive the model, which may be loaded anew between two updates.
"""

from collections.abc import Callable, Sequence

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.backends.transfer import (
    FlushCache,
    JoinGroup,
    LeaveGroup,
    ReadTensor,
    ReceiveBroadcast,
    ReceiveFiles,
    SendBroadcast,
    TransferOrder,
    TransferReply,
    WriteFile,
)
from modelswap_engine.weights.export.exporter import WeightExporter
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.transfer.groups import Groups
from modelswap_engine.weights.transfer.loaders import WeightLoaders
from modelswap_engine.weights.transfer.receiver import WeightReceiver
from modelswap_engine.weights.updater import WeightUpdater


class RankTransfers:
    """The transfers of one rank.

    Args:
        number: of the rank.
        boot_id: of its process.
        get_updater: returns the versions of the model that is loaded now.
        loaders: the custom loaders that may be used.
        flush: empties the cache of keys and values; returns how many running requests were affected.
    """

    def __init__(
        self,
        *,
        number: int,
        boot_id: str,
        get_updater: Callable[[], WeightUpdater],
        loaders: Sequence[str],
        flush: Callable[[RequestPolicy], int],
    ) -> None:
        self._number = number
        self._boot_id = boot_id
        self._flush = flush
        self._groups = Groups(number)
        self._receiver = WeightReceiver(
            get_inbox=lambda: get_updater().inbox, loaders=WeightLoaders(loaders), groups=self._groups
        )
        self._exporter = WeightExporter(get_view=lambda: get_updater().view(), groups=self._groups)

    def carry_out(self, order: TransferOrder, *, pace: Pace) -> TransferReply:
        """Do what an order says, until ``pace`` is cancelled; of what goes out, one rank's is enough.

        Raises:
            ModelswapError: it could not be done.
        """
        reply = TransferReply(rank=self._number, boot_id=self._boot_id)
        match order:
            case ReceiveFiles():
                received = self._receiver.receive_files(order, pace=pace)
                return TransferReply(rank=self._number, boot_id=self._boot_id, received=received)
            case ReceiveBroadcast():
                received = self._receiver.receive_broadcast(order, pace=pace)
                return TransferReply(rank=self._number, boot_id=self._boot_id, received=received)
            case JoinGroup():
                self._groups.join(order)
            case LeaveGroup(group=group):
                self._groups.leave(group)
            case FlushCache(policy=policy):
                return TransferReply(rank=self._number, boot_id=self._boot_id, requests=self._flush(policy))
            case WriteFile() if self._number == 0:
                self._exporter.write(order, pace=pace)
            case SendBroadcast() if self._number == 0:
                self._exporter.send(order, pace=pace)
            case ReadTensor() if self._number == 0:
                reading = self._exporter.read(order)
                return TransferReply(rank=self._number, boot_id=self._boot_id, reading=reading)
            case WriteFile() | SendBroadcast() | ReadTensor():
                pass
        return reply
