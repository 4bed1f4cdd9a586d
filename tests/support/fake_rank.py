"""Our half in one rank of an engine, in memory: it stands in for the real one in unit tests of the sidecar's half.

It holds the bytes of every tensor, proves them by hash, and keeps what a commit replaced. Like the real one it answers
and never raises; long calls answer ``running`` a few times first. It can be told to fail at the next call of a kind.
"""

import fnmatch
import itertools
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import Hashes, Layout, Reply, Stage, TensorRange
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import Busy, Cancelled, Internal, ManifestMismatch, ModelswapError, NotFound
from tests.support.fake_source import sha256

_boots: Final = itertools.count(1)


class FakeRank:
    """See the module.

    Attributes:
        live: bytes by name.
        digest: of what was adopted or committed.
        calls: names of the calls so far, without the questions for progress.
        errors: answered at the next call of a name.
        polls: how often a long call answers ``running``; -1 for ever.
        called_off: long calls that were ended by a call.
        memory: what its container may still use.
        whole: False for one of an older release, which leaves the proof of an exchange to a call of its own.
        requests: how many hold cached keys and values; None where only the engine's routes can drop those.
    """

    def __init__(
        self, live: dict[str, bytes], *, read: Callable[[TensorRange], bytes], rank: int = 0, ranks: int = 1
    ) -> None:
        self.live = dict(live)
        self.digest = ""
        self.calls: list[str] = []
        self.errors: dict[str, ModelswapError] = {}
        self.polls = 2
        self.called_off: list[str] = []
        self.memory = MemoryState()
        self.whole = True
        self.requests: int | None = None
        self.facts = wire.Facts(rank=rank, ranks=ranks, pid=100 + rank, architecture="Tiny", commit_method="pointer")
        self.packed: set[str] = set()
        self.boot_id = f"process-{next(_boots)}"
        self._read = read
        self._staged: tuple[str, str, dict[str, bytes]] | None = None
        self._undo: tuple[str, str, dict[str, bytes]] | None = None
        self._previous: tuple[str, dict[str, bytes]] | None = None
        self._work = ""
        self._left = 0
        self._outcome: Callable[[], wire.Answer] | None = None

    def __call__(self, text: str) -> str:
        envelope = wire.decode_call(text)
        call = envelope.call
        name = type(call).__name__.removesuffix("Call").lower()
        if not isinstance(call, wire.ProgressCall):
            self.calls.append(name)
        try:
            if name in self.errors:
                raise self.errors.pop(name)
            answer = self._answer(call)
        except ModelswapError as error:
            answer = self._reply(error=error)
        return wire.encode_answer(replace(answer, number=envelope.number))

    def refuse(self, why: str) -> None:
        """This model cannot be exchanged."""
        self.facts = replace(self.facts, refusal=why)

    def reply(self) -> Reply:
        """Return an answer of this rank to nothing in particular."""
        return self._reply().reply

    def _answer(self, call: wire.Call) -> wire.Answer:
        match call:
            case wire.HelloCall():
                return replace(self._reply(), facts=replace(self.facts, digest=self.digest))
            case wire.LayoutCall():
                return replace(self._reply(), layout=Layout(architecture="Tiny", groups=_groups(self.live)))
            case wire.MemoryCall():
                size = sum(map(len, self.live.values()))
                return replace(self._reply(), memory=replace(self.memory, model_bytes=size))
            case wire.ProgressCall() | wire.CancelCall():
                return self._progress(call)
            case wire.AdoptCall():
                return self._begin(call.work, lambda: self._adopt(call))
            case wire.StageCall():
                return self._begin(call.work, lambda: self._stage(call.order))
            case wire.VerifyCall():
                return self._begin(call.work, lambda: self._reply(call.operation_id))
            case wire.HashesCall():
                return self._begin(call.work, lambda: self._hashes(call.pattern, still=call.still))
            case _:
                return self._swap(call)

    def _swap(self, call: wire.Call) -> wire.Answer:
        match call:
            case wire.StageRetainedCall():
                if self._previous is None or self._previous[0] != call.order.digest:
                    raise NotFound("not retained")
                self._staged = (call.order.operation_id, *self._previous)
                return self._reply(call.order.operation_id, digest=call.order.digest)
            case wire.PrepareCall():
                return self._reply(call.operation_id, digest=self._staged[1] if self._staged else "")
            case wire.CommitCall():
                if call.whole and self.requests:
                    raise Busy("the engine holds requests")
                if self._staged is None or self._staged[0] != call.operation_id:
                    raise NotFound("nothing is staged")
                old = {name: self.live[name] for name in self._staged[2]}
                self._undo, self._previous = (call.operation_id, self.digest, old), (self.digest, old)
                self.live |= self._staged[2]
                self.digest = self._staged[1]
                self._staged = None
                return self._exchanged(call, self._reply(call.operation_id, microseconds=50.0))
            case wire.RollbackCall():
                if self._undo is not None and self._undo[0] == call.operation_id:
                    self.live |= self._undo[2]
                    self.digest, self._undo, self._previous = self._undo[1], None, None
                return self._exchanged(call, self._reply(call.operation_id))
            case wire.ReleaseCall():
                self._staged = self._undo = None
                if call.previous:
                    self._previous = None
                return self._reply(call.operation_id)
            case _:
                raise Internal(f"the fake has no {call}")

    def _exchanged(self, call: wire.CommitCall | wire.RollbackCall, answer: wire.Answer) -> wire.Answer:
        return replace(
            answer, proved=self.whole and call.whole, forgot=self.whole and call.whole and self.requests == 0
        )

    def _begin(self, work: str, outcome: Callable[[], wire.Answer]) -> wire.Answer:
        self._work, self._left, self._outcome = work, self.polls, outcome
        return self._progress(wire.ProgressCall(work))

    def _progress(self, call: wire.ProgressCall | wire.CancelCall) -> wire.Answer:
        if call.work != self._work or self._outcome is None:
            return self._reply()
        if isinstance(call, wire.CancelCall):
            self.called_off.append(call.work)
            cancelled = self._reply(error=Cancelled("called off"))
            self._left, self._outcome = 0, lambda: cancelled
        if self._left:
            self._left -= 1
            return replace(self._reply(), running=True)
        answer = self._outcome()
        self._outcome = lambda: answer
        return answer

    def _adopt(self, call: wire.AdoptCall) -> wire.Answer:
        for tensor in call.order.tensors:
            if sha256(self.live[tensor.name]) != tensor.sha256:
                return self._reply(call.order.operation_id, error=ManifestMismatch(f"{tensor.name} is another"))
        self._staged = self._undo = self._previous = None
        self.digest = call.order.digest
        return self._reply(call.order.operation_id)

    def _stage(self, order: Stage) -> wire.Answer:
        found = {tensor.name: self._read(tensor) for tensor in order.tensors}
        self._staged = (order.operation_id, order.digest, found)
        size = sum(map(len, found.values()))
        return self._reply(order.operation_id, digest=order.digest, size=size)

    def _hashes(self, pattern: str, *, still: bool) -> wire.Answer:
        named = {name: sha256(data) for name, data in self.live.items() if fnmatch.fnmatchcase(name, pattern)}
        blind = set[str]() if still else self.packed & named.keys()
        found = {name: value for name, value in named.items() if name not in blind}
        return replace(self._reply(), hashes=Hashes(tensors=found, bytes=1, seconds=0.1, unverifiable=tuple(blind)))

    def _reply(
        self,
        operation_id: str = "",
        *,
        digest: str | None = None,
        error: ModelswapError | None = None,
        microseconds: float = 0.0,
        size: int = 0,
    ) -> wire.Answer:
        return wire.Answer(
            number=0,
            reply=Reply(
                operation_id=operation_id,
                rank=self.facts.rank,
                boot_id=self.boot_id,
                digest=self.digest if digest is None else digest,
                error=error.body() if error is not None else None,
                commit_microseconds=microseconds,
                method="pointer" if microseconds else "",
                staged_bytes=size,
                fetched_bytes=size,
            ),
        )


def _groups(live: dict[str, bytes]) -> tuple[tuple[str, ...], ...]:
    return tuple((name,) for name in sorted(live))
