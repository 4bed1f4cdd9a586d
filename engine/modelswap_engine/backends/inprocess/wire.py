"""The messages between the sidecar and its half inside an engine's process, as JSON text.

Text, because that is what engines carry to all their ranks: an argument of a collective call, a word of a route. It
knows neither. The two ends are installed apart (the sidecar's image and the engine's) and may be of different releases,
so each call names the release of these messages, and unknown fields are ignored.

A call is answered by every rank, with one :class:`Answer` each that repeats the call's number, so that an answer to
another call is never taken for one to this; a rank that fails says so in it and never raises. While a rank answers, its
engine makes no step. So calls that read or hash many bytes only begin: they answer ``running`` and go on in a thread,
and :class:`ProgressCall` with their ``work`` asks for the outcome. ``work`` is an id that is never used twice; one that
was begun again under the same id is not begun a second time.
"""

from typing import Final

import msgspec

from modelswap_engine.backends.port import Hashes, Layout, Load, Reply, Stage, StageRetained
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import BadRequest

WIRE: Final = 1
"""Release of these messages; both ends must have the same."""


class HelloCall(msgspec.Struct, frozen=True, tag="hello"):
    """Say who you are: answers ``facts``. Legal at any time, and changes nothing."""


class AdoptCall(msgspec.Struct, frozen=True, tag="adopt"):
    """Long. Prove by hash that the engine holds this version, and take it over as the live one.

    Whatever was staged, retained or committed before is forgotten, and the tensors that are live stay what they are.
    Live tensors that are not the order's are answered with ``ManifestMismatch``, and nothing is taken over. The caller
    promises that the engine computes nothing until the outcome is there.
    """

    work: str
    order: Load


class LayoutCall(msgspec.Struct, frozen=True, tag="layout"):
    """Say how parameters are made of checkpoint tensors: answers ``layout``. Legal once a version was adopted."""


class StageCall(msgspec.Struct, frozen=True, tag="stage"):
    """Long. Stage tensors beside the live ones; the reply is as that of ``Backend.stage``."""

    work: str
    order: Stage


class StageRetainedCall(msgspec.Struct, frozen=True, tag="stage_retained"):
    """Stage the retained version; nothing is read."""

    order: StageRetained


class PrepareCall(msgspec.Struct, frozen=True, tag="prepare"):
    """Work out the commit and its inverse; the reply carries the staged digest."""

    operation_id: str


class CommitCall(msgspec.Struct, frozen=True, tag="commit"):
    """Make the prepared tensors live; the caller's promise is that the engine makes no step meanwhile.

    Cached keys and values are the caller's to flush, and a :class:`VerifyCall` is to follow. With ``whole`` both are
    done before the engine can make a step, as far as it can be had to from within, and what was is in the answer; an
    engine that holds requests answers ``Busy``, and nothing was changed.
    """

    operation_id: str
    whole: bool = False


class VerifyCall(msgspec.Struct, frozen=True, tag="verify"):
    """Prove that what is live is what was staged: by identity; with ``strict`` by hash, which is long.

    With ``strict`` the caller promises that the engine computes nothing until the outcome is there.
    """

    work: str
    operation_id: str
    strict: bool


class RollbackCall(msgspec.Struct, frozen=True, tag="rollback"):
    """Put back what was live before this operation's commit; the same promise, and ``whole``, as for a commit.

    Requests do not keep it from being carried out, only from forgetting what was cached.
    """

    operation_id: str
    whole: bool = False


class ReleaseCall(msgspec.Struct, frozen=True, tag="release"):
    """Drop what is staged for the operation; with ``previous`` also the retained version. Ends its staging."""

    operation_id: str
    previous: bool


class HashesCall(msgspec.Struct, frozen=True, tag="hashes"):
    """Long. Hash live tensors whose checkpoint names match a glob; answers ``hashes``.

    ``bytes_per_second`` bounds the rate of each rank; 0 is no bound. Some engines keep weights in a form that can only
    be looked into while they compute nothing; ``still`` is the caller's promise that they do not until the outcome is
    there. Without it such weights are among the ``unverifiable``.
    """

    work: str
    pattern: str
    bytes_per_second: int = 0
    still: bool = False


class MemoryCall(msgspec.Struct, frozen=True, tag="memory"):
    """Say where the rank's memory is: answers ``memory``."""


class ProgressCall(msgspec.Struct, frozen=True, tag="progress"):
    """Ask for the outcome of a long call; the last answer stays the same until the next long call begins."""

    work: str


class CancelCall(msgspec.Struct, frozen=True, tag="cancel"):
    """End a long call: its outcome is ``Cancelled``. One that has ended, or never began, is nothing to do."""

    work: str


Call = (
    HelloCall
    | AdoptCall
    | LayoutCall
    | StageCall
    | StageRetainedCall
    | PrepareCall
    | CommitCall
    | VerifyCall
    | RollbackCall
    | ReleaseCall
    | HashesCall
    | MemoryCall
    | ProgressCall
    | CancelCall
)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A call on its way to all ranks."""

    wire: int = WIRE
    number: int
    call: Call


class _Release(msgspec.Struct, frozen=True, kw_only=True):
    """As much of an envelope as can be read whatever its release."""

    wire: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself.

    Attributes:
        wire: release of these messages that it speaks.
        software: name and version of our half, for people.
        pid: of the rank's process.
        rank: from 0; ``ranks`` hold one model together.
        replica: which copy of the model it belongs to.
        architecture: the model's class.
        refusal: why weights of this model cannot be exchanged here, "" when they can.
        commit_method: ``pointer`` or ``copy``.
        digest: of the version that was adopted or committed and has been proved, "" for none.
        adapter_modules: modules that adapters can change, by the names that they have in a checkpoint.
    """

    wire: int = WIRE
    software: str = ""
    pid: int = 0
    rank: int
    ranks: int
    replica: int = 0
    architecture: str = ""
    refusal: str = ""
    commit_method: str = ""
    digest: str = ""
    adapter_modules: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's answer to one call: the one whose ``number`` it repeats, 0 for one that could not be read.

    ``reply`` always says which rank of which start answers, and what went wrong; its operation id is that of the call,
    or "" where the call has none. While ``running`` is True the work goes on and nothing else in here counts.
    ``done_bytes`` is how many it has read or hashed so far.

    Of a ``whole`` exchange: ``forgot`` says that no cached keys and values are left, ``proved`` that what is live was
    proved by identity to be the reply's digest, and ``named`` that the engine calls its weights by it. The last one is
    for whoever carries the answers of all ranks to say.
    """

    number: int
    reply: Reply
    running: bool = False
    done_bytes: int = 0
    forgot: bool = False
    proved: bool = False
    named: bool = False
    facts: Facts | None = None
    layout: Layout | None = None
    hashes: Hashes | None = None
    memory: MemoryState | None = None


_encoder: Final = msgspec.json.Encoder()
_releases: Final[msgspec.json.Decoder[_Release]] = msgspec.json.Decoder(_Release)
_envelopes: Final[msgspec.json.Decoder[Envelope]] = msgspec.json.Decoder(Envelope)
_answers: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


def encode_call(number: int, call: Call) -> str:
    """Return a call as text; its number is above 0 and used once."""
    return _encoder.encode(Envelope(number=number, call=call)).decode()


def decode_call(text: str) -> Envelope:
    """Read a call.

    Raises:
        BadRequest: not one of these messages, or of another release.
    """
    try:
        release = _releases.decode(text).wire
        if release != WIRE:
            raise BadRequest(
                f"the sidecar speaks release {release} of the messages to the engine's process, this one {WIRE}",
                advice="install the same release of modelswap beside the engine as in the sidecar",
                details={"theirs": str(release), "ours": str(WIRE)},
            )
        return _envelopes.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"not a call to the engine's process: {error}") from None


def encode_answer(answer: Answer) -> str:
    """Return an answer as text."""
    return _encoder.encode(answer).decode()


def decode_answer(text: str) -> Answer:
    """Read an answer.

    Raises:
        BadRequest: not one of these messages.
    """
    try:
        return _answers.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"not an answer of a rank: {error}") from None
