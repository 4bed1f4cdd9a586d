"""What an engine in memory takes in from outside and gives out; the other half of :mod:`tests.support.fake_backend`."""

from pathlib import Path
from typing import TYPE_CHECKING

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.backends.transfer import (
    FlushCache,
    JoinGroup,
    LeaveGroup,
    Reading,
    ReadTensor,
    ReceiveBroadcast,
    ReceivedTensor,
    ReceiveFiles,
    SendBroadcast,
    TransferOrder,
    TransferReply,
    WriteFile,
)
from modelswap_engine.protocol.errors import Busy, ModelswapError, SourceUnreadable, UnknownGroup
from tests.support.fake_source import sha256
from tests.support.tensor_files import written

if TYPE_CHECKING:
    from tests.support.fake_backend import FakeBackend


def refusal(error: str | ModelswapError) -> TransferReply:
    """What a rank answers that could not."""
    failure = SourceUnreadable(error) if isinstance(error, str) else error
    return TransferReply(rank=0, boot_id="", error=failure.body())


class Outside:
    """The world around the engine.

    Attributes:
        groups: the groups that the engine is in, as it joined them.
        coming: what somebody broadcasts to a group, by name.
        sent: what the engine broadcast, by group.
        flushes: how the cache was emptied.
        flush_error: what a flush ends with, if anything.
    """

    def __init__(self) -> None:
        self.groups: dict[str, JoinGroup] = {}
        self.coming: dict[str, bytes] = {}
        self.sent: dict[str, dict[str, bytes]] = {}
        self.flushes: list[RequestPolicy] = []
        self.flush_error: ModelswapError | None = None

    def carry_out(self, engine: "FakeBackend", order: TransferOrder) -> TransferReply:
        try:
            return self._carry_out(engine, order)
        except (OSError, ModelswapError) as error:
            return refusal(str(error) if isinstance(error, OSError) else error)

    def _carry_out(self, engine: "FakeBackend", order: TransferOrder) -> TransferReply:
        done = TransferReply(rank=0, boot_id="")
        match order:
            case ReceiveFiles():
                found = {
                    item.name: Path(item.path).read_bytes()[item.offset :][: item.nbytes] for item in order.tensors
                }
                return self._keep(engine, order.operation_id, found)
            case ReceiveBroadcast():
                self._find(order.group)
                return self._keep(engine, order.operation_id, {t.name: self.coming[t.name] for t in order.tensors})
            case JoinGroup():
                if order.group in self.groups:
                    raise Busy(f"a group {order.group!r} exists")
                self.groups[order.group] = order
            case LeaveGroup():
                self._find(order.group)
                del self.groups[order.group]
            case SendBroadcast():
                self._find(order.group)
                self.sent[order.group] = {name: engine.live[name] for name in order.names}
            case WriteFile():
                written(Path(order.path), {item.name: engine.live[item.name] for item in order.tensors})
            case FlushCache(policy=policy):
                if self.flush_error is not None:
                    raise self.flush_error
                if policy is RequestPolicy.NONE_RUNNING and engine.requests:
                    raise Busy(f"{engine.requests} requests are still running")
                self.flushes.append(policy)
                return TransferReply(rank=0, boot_id="", requests=engine.requests)
            case ReadTensor():
                numbers = tuple(map(float, engine.live[order.name][: order.rows]))
                reading = Reading(dtype="U8", shape=(len(numbers),), numbers=numbers)
                return TransferReply(rank=0, boot_id="", reading=reading)
        return done

    def _keep(self, engine: "FakeBackend", operation_id: str, found: dict[str, bytes]) -> TransferReply:
        if engine.inbox is None or engine.inbox[0] != operation_id:
            engine.inbox = (operation_id, {})
        engine.inbox[1].update(found)
        received = tuple(
            ReceivedTensor(name=name, dtype="U8", shape=(len(data),), nbytes=len(data), sha256=sha256(data))
            for name, data in found.items()
        )
        return TransferReply(rank=0, boot_id="", received=received)

    def _find(self, group: str) -> None:
        if group not in self.groups:
            raise UnknownGroup(f"this engine is in no group {group!r}")
