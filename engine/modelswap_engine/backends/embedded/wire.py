"""The messages between front and worker, and how they are framed on the socket: 4 bytes of length, then msgpack.

Both ends are this package at the same version, so there is no negotiation; they are still decoded by type, because a
worker that runs a model is not trusted to speak well-formed nonsense.
"""

import struct
from typing import Final

import msgspec

from modelswap_engine.backends.adapters import AdapterLayout, LoadAdapter
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.port import (
    Generate,
    Hashes,
    Load,
    PromptTrial,
    Reply,
    RequestPolicy,
    Stage,
    StageRetained,
    Tokens,
)
from modelswap_engine.backends.transfer import TransferOrder, TransferReply
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import ErrorBody

HEADER: Final = struct.Struct(">I")
MAX_FRAME: Final = 256 << 20


class Seat(msgspec.Struct, frozen=True):
    """A rank's place among the ``size`` ranks of one model; they meet through the file ``store``."""

    index: int
    size: int
    store: str


class Setup(msgspec.Struct, frozen=True, tag=True):
    """First message to a worker. Without a ``seat`` its model is whole."""

    rank: int
    settings: EmbeddedSettings
    seat: Seat | None = None


class LoadCall(msgspec.Struct, frozen=True, tag=True):
    """Load a whole version."""

    call: int
    order: Load


class StageCall(msgspec.Struct, frozen=True, tag=True):
    """Stage tensors."""

    call: int
    order: Stage


class StageRetainedCall(msgspec.Struct, frozen=True, tag=True):
    """Stage the retained version."""

    call: int
    order: StageRetained


class TryOutCall(msgspec.Struct, frozen=True, tag=True):
    """Run prompts on what is staged."""

    call: int
    operation_id: str
    trials: tuple[PromptTrial, ...]


class PrepareCall(msgspec.Struct, frozen=True, tag=True):
    """Work out the commit; with ``overlap`` also bring up a second instance."""

    call: int
    operation_id: str
    overlap: bool = False


class PauseCall(msgspec.Struct, frozen=True, tag=True):
    """Park between two steps, within ``timeout`` seconds."""

    call: int
    operation_id: str
    timeout: float


class CommitCall(msgspec.Struct, frozen=True, tag=True):
    """Make the staged tensors live."""

    call: int
    operation_id: str
    policy: RequestPolicy


class RetireCall(msgspec.Struct, frozen=True, tag=True):
    """End the instance that an overlapping commit left behind."""

    call: int
    operation_id: str


class VerifyCall(msgspec.Struct, frozen=True, tag=True):
    """Prove what is live."""

    call: int
    operation_id: str
    strict: bool


class RollbackCall(msgspec.Struct, frozen=True, tag=True):
    """Put the old tensors back."""

    call: int
    operation_id: str


class ResumeCall(msgspec.Struct, frozen=True, tag=True):
    """Step again."""

    call: int
    operation_id: str


class ReleaseCall(msgspec.Struct, frozen=True, tag=True):
    """Drop staged (and retained) tensors; stops a staging of the same operation that still runs."""

    call: int
    operation_id: str
    previous: bool


class HashesCall(msgspec.Struct, frozen=True, tag=True):
    """Re-hash live tensors; with a bound of the rate also at a lower priority than decoding."""

    call: int
    pattern: str
    bytes_per_second: int = 0


class CancelStage(msgspec.Struct, frozen=True, tag=True):
    """Stop a staging that runs or waits; it answers with an error."""

    operation_id: str


class SettleCall(msgspec.Struct, frozen=True, tag=True):
    """Undo what is not proven, drop what is staged or retained, end a pause, and say what is live."""

    call: int
    operation_id: str


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Stop a load, a proof by hash or a re-hash that runs or waits; it answers with an error."""

    call: int


class TransferCall(msgspec.Struct, frozen=True, tag=True):
    """Take weights in or give them out."""

    call: int
    order: TransferOrder


class CancelTransfer(msgspec.Struct, frozen=True, tag=True):
    """Stop a transfer that runs or waits; it answers with an error."""

    call: int


class MemoryCall(msgspec.Struct, frozen=True, tag=True):
    """Report memory."""

    call: int


class LoadAdapterCall(msgspec.Struct, frozen=True, tag=True):
    """Bring an adapter into memory."""

    call: int
    order: LoadAdapter


class PlaceAdapterCall(msgspec.Struct, frozen=True, tag=True):
    """Put an adapter into a slot."""

    call: int
    adapter_id: str
    slot: int


class ClearSlotCall(msgspec.Struct, frozen=True, tag=True):
    """Empty a slot."""

    call: int
    slot: int


class DropAdapterCall(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter."""

    call: int
    adapter_id: str


class CancelAdapter(msgspec.Struct, frozen=True, tag=True):
    """Stop the loading of an adapter; it answers with an error."""

    call: int


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start a generation."""

    request: Generate


class Wake(msgspec.Struct, frozen=True, tag=True):
    """The first rank of a split model has got a request: the others need not sleep on."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a generation; nothing more is said about it."""

    request_id: str


SwapCall = (
    StageCall
    | StageRetainedCall
    | TryOutCall
    | PrepareCall
    | PauseCall
    | CommitCall
    | RetireCall
    | VerifyCall
    | RollbackCall
    | ResumeCall
    | ReleaseCall
    | SettleCall
)
ControlCall = LoadCall | SwapCall
AdapterCall = LoadAdapterCall | PlaceAdapterCall | ClearSlotCall | DropAdapterCall
"""They wait neither for a swap nor for a hash."""

Order = (
    ControlCall
    | AdapterCall
    | HashesCall
    | TransferCall
    | CancelAdapter
    | CancelStage
    | CancelCall
    | CancelTransfer
    | MemoryCall
    | Submit
    | Abort
    | Wake
    | Setup
)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a worker: it has imported everything and waits for a load."""

    boot_id: str
    pid: int


class ModelFacts(msgspec.Struct, frozen=True):
    """What the front must know of a loaded model to refuse requests that would break a step."""

    architecture: str
    groups: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]
    vocabulary: int
    max_tokens: int
    adapters: AdapterLayout
    commit_method: str = ""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Outcome of a control call; ``facts`` after a load."""

    call: int
    reply: Reply
    facts: ModelFacts | None = None


class HashesAnswer(msgspec.Struct, frozen=True, tag=True):
    """Hashes, or why there are none."""

    call: int
    hashes: Hashes | None = None
    error: ErrorBody | None = None


class TransferAnswer(msgspec.Struct, frozen=True, tag=True):
    """Outcome of a transfer."""

    call: int
    reply: TransferReply


class MemoryAnswer(msgspec.Struct, frozen=True, tag=True):
    """Where the memory is."""

    call: int
    memory: MemoryState


class Produced(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one request."""

    tokens: Tokens


class Dying(msgspec.Struct, frozen=True, tag=True):
    """Last words: why it cannot go on."""

    message: str


Event = Hello | Answer | HashesAnswer | TransferAnswer | MemoryAnswer | Produced | Dying

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def request_key(number: int, adapter: str) -> str:
    """Return the id under which the workers know a request; it says which adapter computes it, on every rank."""
    return f"{number}@{adapter}"


def adapter_of(key: str) -> str:
    """Return the adapter's identity that an id says; "" is the base model."""
    return key.partition("@")[2]


def frame(message: Order | Event) -> bytes:
    """Return a message as it goes over the socket."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Read a frame's length.

    Raises:
        ValueError: longer than any message of ours.
    """
    size = int(HEADER.unpack(header)[0])
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes is longer than {MAX_FRAME}")
    return size


def decode_order(body: bytes) -> Order:
    """Read a message for a worker."""
    return _orders.decode(body)


def decode_event(body: bytes) -> Event:
    """Read a message of a worker."""
    return _events.decode(body)
