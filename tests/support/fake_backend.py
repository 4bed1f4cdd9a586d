"""An engine in memory: it stands in for a real one in unit tests of the swap, and nowhere else.

It is faithful where the swap depends on it: it holds the bytes of every tensor, proves them by hash, keeps what a
commit replaced, forgets everything when it dies, and notes every call that the order of the port forbids. It can be
told to fail, die, hang or lie at any step.
"""

import asyncio
import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto

from msgspec.structs import replace

from modelswap_engine.backends.port import (
    Bounds,
    Generate,
    Hashes,
    Layout,
    Load,
    PromptTrial,
    RankState,
    Reply,
    RequestPolicy,
    RuntimeHash,
    Stage,
    StageRetained,
    TensorRange,
    TokenStream,
)
from modelswap_engine.backends.transfer import TransferOrder, TransferReply
from modelswap_engine.protocol.engine_state import Capabilities, MemoryState
from modelswap_engine.protocol.errors import (
    Internal,
    ManifestMismatch,
    ModelswapError,
    UnsupportedChange,
    WorkerLost,
)
from modelswap_engine.protocol.policy import TrafficMode
from tests.support import late
from tests.support.fake_source import sha256
from tests.support.fake_transfers import Outside, refusal

Tensors = dict[str, bytes]


class Fault(Enum):
    """What goes wrong, once, at a step."""

    ERROR = auto()  # the last rank answers an error and the step did not happen
    LATE_ERROR = auto()  # the step happened, but the last rank answers an error
    RAISE = auto()  # a defect: an exception that is no typed error
    DIE = auto()  # the worker dies before the step
    DIE_AFTER = auto()  # the worker dies after the step
    HANG = auto()  # no answer, ever
    LIE = auto()  # the answer names another digest
    FLIP = auto()  # a bit of a live tensor flips
    LOSE = auto()  # the last replica dies after the step, the others live on


class FakeBackend:
    """See the module.

    Attributes:
        faults: what goes wrong at the next call of a step; each happens once.
        steps: every call so far.
        violations: calls that the port's order forbids; tests look at it at the end.
        lossy: tensors that are held in another form, and known by that.
        hidden: tensors that can only be seen while no request runs.
        requests: what ``running`` answers.
        longest: how long its calls may take.
        tries_live: prompts are tried after the commit, too; that step is called ``try_live``.
        limit: bytes that the engine may use, -1 for no limit.
        instance: bytes that a second instance takes beside the tensors.
        lost: with replicas (each of its ranks is one): the ranks that are dead while the others live.
        astray: tensors that only one rank has other bytes of, by rank.
    """

    def __init__(self, *, read: Callable[[TensorRange], bytes], ranks: int = 2, replicas: bool = False) -> None:
        self._read = read
        self._size = ranks
        self._replicas = replicas
        self.lost: set[int] = set()
        self.astray: dict[int, Tensors] = {}
        self._starts: Counter[int] = Counter()
        self._boots = 0
        self._alive = False
        self._busy = ""
        self.faults: dict[str, Fault] = {}
        self.error: ModelswapError = Internal("told to fail")
        self.steps: list[str] = []
        self.violations: list[str] = []
        self.requests = 0
        self.limit = -1
        self.modes = list(TrafficMode)
        self.why: dict[str, str] = {}
        self.instance = 0
        self.policies: list[RequestPolicy] = []
        self.rates: list[int] = []
        self.hidden: set[str] = set()
        self.trials: list[PromptTrial] = []
        self.tries_live = False
        self.longest = Bounds()
        self.lossy: set[str] = set()
        self.outside = Outside()
        self._clear()

    def _clear(self) -> None:
        self.live: Tensors = {}
        self.wanted: Tensors = {}  # what ``live`` must be: the same, unless a bit flipped
        self.digest = ""
        self.staged: tuple[str, str, Tensors] | None = None
        self.prepared = ""
        self.paused = ""
        self.paused_for = RequestPolicy.NONE_RUNNING
        self.committed = ""
        self.second = self.undone = ""
        self.undo: tuple[str, Tensors] | None = None
        self.previous: tuple[str, Tensors] | None = None
        self.inbox: tuple[str, Tensors] | None = None

    def kill(self) -> None:
        """The worker dies."""
        self._alive = False
        self.lost.clear()
        self._clear()

    @property
    def alive(self) -> bool:
        return self._alive

    async def start(self) -> None:
        self.steps.append("start")
        self._boots += 1
        self._alive = True

    async def stop(self) -> None:
        self.steps.append("stop")
        self.kill()

    async def load(self, order: Load) -> Sequence[Reply]:
        if not self._alive:
            await self.start()
        kept = order.keep_proven and bool(self.lost) and len(self.lost) < self._size and self.digest == order.digest
        living = set(range(self._size)) - self.lost if kept else set()
        if not kept:
            self._clear()

        def act() -> None:
            self.live = self._fetch(order.tensors)
            self.wanted = dict(self.live)
            self.digest = order.digest
            self._starts.update(self.lost)
            self.lost.clear()
            self._set_right(self.live)

        replies = await self._step("load", order.operation_id, act)
        return [replace(reply, kept=reply.rank in living) for reply in replies]

    async def settle(self, operation_id: str, digest: str) -> Sequence[Reply]:
        self.steps.append("settle")
        if not self._alive or len(self.lost) == self._size or not self._replicas:
            return []
        if self.paused and self.committed == self.paused and self.undo is not None:
            self.digest, old = self.undo
            self.live = self.live | old
        if self.digest != digest:
            return []
        self.staged, self.prepared, self.paused, self.committed = None, "", "", ""
        self.undo = self.previous = None
        return [self._reply(rank, operation_id, digest) for rank in range(self._size) if rank not in self.lost]

    def _reply(self, rank: int, operation_id: str, digest: str) -> Reply:
        return Reply(operation_id=operation_id, rank=rank, boot_id=self._boot_id(rank), digest=digest)

    def _set_right(self, tensors: Tensors) -> None:
        self.astray = {
            rank: left
            for rank, held in self.astray.items()
            if (left := {name: data for name, data in held.items() if name not in tensors})
        }

    @property
    def _numbers(self) -> range:
        return range(self._size)

    def _boot_id(self, rank: int) -> str:
        return f"boot-{self._boots}.{self._starts[rank]}"

    def bounds(self) -> Bounds:
        return self.longest

    def capabilities(self) -> Capabilities:
        return Capabilities(traffic_modes=list(self.modes), refused_modes=dict(self.why), tries_live=self.tries_live)

    def layout(self) -> Layout:
        """Every tensor alone, but ``q`` and ``k`` are one parameter."""
        fused = tuple(name for name in ("k", "q") if name in self.live)
        singles = tuple((name,) for name in sorted(self.live) if name not in fused)
        return Layout(architecture="Tiny", groups=((fused,) if fused else ()) + singles)

    def ranks(self) -> Sequence[RankState]:
        return [
            RankState(
                rank=rank,
                boot_id=self._boot_id(rank),
                pid=1,
                alive=self._alive and rank not in self.lost,
                digest="" if rank in self.lost else self.digest,
                replica=rank if self._replicas else 0,
            )
            for rank in range(self._size)
        ]

    async def memory(self) -> MemoryState:
        self._need(self._alive and not self.lost, "memory of a dead engine")
        staged = _size(self.staged[2]) if self.staged is not None else 0
        staged += _size(self.inbox[1]) if self.inbox is not None else 0
        previous = _size(self.previous[1]) if self.previous is not None else 0
        used = _size(self.live) + staged + previous + (self.instance if self.second else 0)
        return MemoryState(
            model_bytes=_size(self.live),
            staged_bytes=staged,
            previous_bytes=previous,
            instance_bytes=self.instance,
            limit_bytes=self.limit,
            available_bytes=-1 if self.limit < 0 else self.limit - used,
        )

    async def stage(self, order: Stage | StageRetained) -> Sequence[Reply]:
        self._law(bool(self.live) and self.staged is None and not self.paused and not self.second, "stage")

        def act() -> None:
            if isinstance(order, StageRetained):
                if self.previous is None or self.previous[0] != order.digest:
                    raise UnsupportedChange("that version is not retained")
                tensors = self.previous[1]
            else:
                if order.drop_previous:
                    self.previous = None
                tensors = self._fetch(order.tensors)
            self.staged = (order.operation_id, order.digest, tensors)

        fetched = sum(t.nbytes for t in order.tensors) if isinstance(order, Stage) else 0
        return await self._step("stage", order.operation_id, act, fetched_bytes=fetched)

    async def try_out(self, operation_id: str, trials: Sequence[PromptTrial]) -> Sequence[Reply]:
        self.trials += trials
        if self.tries_live and self.paused:
            self._law(self.paused == operation_id == self.committed and self.requests == 0, "try_live")
            return await self._step("try_live", operation_id, lambda: None)
        self._law(self.staged is not None and self.staged[0] == operation_id and not self.paused, "try_out")
        return await self._step("try_out", operation_id, lambda: None)

    async def prepare(self, operation_id: str, *, overlap: bool = False) -> Sequence[Reply]:
        self._law(self.staged is not None and self.staged[0] == operation_id, "prepare")

        def act() -> None:
            self.prepared = operation_id
            self.second = operation_id if overlap else ""

        return await self._step("prepare", operation_id, act, digest=self.staged[1] if self.staged else "")

    async def pause(self, operation_id: str, *, timeout: float, policy: RequestPolicy) -> Sequence[Reply]:
        self._law(self.prepared == operation_id and not self.paused, "pause")

        def act() -> None:
            self.paused, self.paused_for = operation_id, policy

        return await self._step("pause", operation_id, act)

    async def commit(self, operation_id: str, policy: RequestPolicy) -> Sequence[Reply]:
        allowed = self.second if policy is RequestPolicy.OVERLAP else self.paused
        self._law(allowed == operation_id == self.prepared and self.committed != operation_id, "commit")
        self._law(policy in (self.paused_for, RequestPolicy.OVERLAP), "commit with another policy than the pause")
        self.policies.append(policy)

        def act() -> None:
            assert self.staged is not None
            _, digest, tensors = self.staged
            old = {name: self.live[name] for name in tensors}
            self.live, self.wanted = self.live | tensors, self.wanted | tensors
            self._set_right(tensors)
            self.undo = (self.digest, old)
            self.previous = (self.digest, old)
            self.digest, self.staged, self.committed = digest, None, operation_id

        return await self._step("commit", operation_id, act, requests=self.requests, commit_microseconds=5.0)

    async def retire(self, operation_id: str) -> Sequence[Reply]:
        self._law(self.second == operation_id == self.committed, "retire")
        left, self.requests = self.requests, 0

        def act() -> None:
            self.second = ""

        return await self._step("retire", operation_id, act, requests=left)

    async def verify(self, operation_id: str, *, strict: bool) -> Sequence[Reply]:
        self._law(operation_id in (self.paused, self.second, self.undone), "verify")

        def act() -> None:
            if strict and self.live != self.wanted:
                raise ManifestMismatch("a live tensor has other bytes than the manifest says")

        return await self._step("verify", operation_id, act, digest=self.digest)

    async def rollback(self, operation_id: str) -> Sequence[Reply]:
        self._law(operation_id in (self.paused, self.second), "rollback")

        def act() -> None:
            self.undone, self.second = self.second, ""
            if self.committed == operation_id and self.undo is not None:
                self.digest, old = self.undo
                self.live = self.live | old
                self.wanted = self.wanted | old
                self.undo = self.previous = None
                self.committed = ""

        return await self._step("rollback", operation_id, act)

    async def resume(self, operation_id: str) -> Sequence[Reply]:
        def act() -> None:
            self.paused = ""

        return await self._step("resume", operation_id, act)

    async def release(self, operation_id: str, *, previous: bool) -> Sequence[Reply]:
        self._law(not self.paused and (not self.second or self.committed != self.second), "release")

        def act() -> None:
            self.second = self.undone = ""
            self.staged, self.prepared = None, ""
            if self.inbox is not None and self.inbox[0] == operation_id:
                self.inbox = None
            if previous:
                self.previous = None

        return await self._step("release", operation_id, act)

    async def hashes(self, pattern: str, *, bytes_per_second: int = 0, still: bool = False) -> Hashes:
        self._law(not self.paused, "hashes")
        self.rates.append(bytes_per_second)
        await self._step("hashes", "", lambda: None)
        self._law(not (still and self.requests), "hashes of an engine that is not still")
        blind = set[str]() if still else self.hidden
        found = {name: sha256(data) for name, data in self.live.items() if fnmatch.fnmatchcase(name, pattern)}
        unseen = sorted(blind & found.keys())
        found = {name: value for name, value in found.items() if name not in blind}
        lossy = sorted(self.lossy & found.keys())
        disagreed = {
            name: {rank: sha256(self.astray.get(rank, self.live).get(name, self.live[name])) for rank in self._numbers}
            for name in found.keys() & {name for tensors in self.astray.values() for name in tensors}
        }
        return Hashes(
            tensors={name: value for name, value in found.items() if name not in self.lossy | disagreed.keys()},
            ranks=tuple(self._numbers),
            disagreed=disagreed,
            bytes=_size(self.live),
            seconds=0.1,
            unverifiable=(*lossy, *unseen),
            runtime=tuple(
                RuntimeHash(
                    name=f"made of {name}", sources=(name,), expected=sha256(self.wanted[name]), actual=found[name]
                )
                for name in lossy
            ),
        )

    async def transfer(self, order: TransferOrder, *, timeout: float) -> Sequence[TransferReply]:
        """Every rank does the same, but for a fault."""
        self.steps.append("transfer")
        self._need(self._alive, "transfer")
        fault = self.faults.pop("transfer", None)
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        await late.act()
        reply = self.outside.carry_out(self, order) if fault is not Fault.ERROR else refusal("told to fail")
        replies = [replace(reply, rank=rank, boot_id=f"boot-{self._boots}") for rank in range(self._size)]
        if fault is Fault.LIE:
            replies[0] = replace(replies[0], received=reply.received[:-1])
        return replies

    def generate(self, request: Generate) -> TokenStream:
        raise AssertionError("the swap generates nothing")

    def running(self) -> int:
        return self.requests

    async def _step(
        self,
        name: str,
        operation_id: str,
        act: Callable[[], None],
        *,
        digest: str | None = None,
        fetched_bytes: int = 0,
        requests: int = 0,
        commit_microseconds: float = 0.0,
    ) -> Sequence[Reply]:
        self.steps.append(name)
        if self._busy:
            self.violations.append(f"{name} while {self._busy} has not answered")
        self._busy = name
        try:
            error = await self._act(name, self.faults.pop(name, None), act)
        finally:
            self._busy = ""
        answered = self.digest if digest is None else digest
        return [
            Reply(
                operation_id=operation_id,
                rank=rank,
                boot_id=self._boot_id(rank),
                error=error.body() if error is not None and rank == self._size - 1 else None,
                digest="sha256:lie" if self._lying and rank == self._size - 1 else answered,
                fetched_bytes=fetched_bytes if rank == 0 else 0,
                staged_bytes=_size(self.staged[2]) if self.staged is not None and rank == 0 else 0,
                commit_microseconds=commit_microseconds + rank,
                requests=requests if rank == 0 else 0,
                method="pointer",
            )
            for rank in range(self._size)
        ]

    async def _act(self, name: str, fault: Fault | None, act: Callable[[], None]) -> ModelswapError | None:
        self._lying = fault is Fault.LIE
        self._need(self._alive, name)
        await late.act()
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        if fault is Fault.RAISE:
            raise RuntimeError(f"{name} was told to break")
        if fault is Fault.DIE:
            self.kill()
        self._need(self._alive, name)
        if fault is Fault.ERROR:
            return self.error
        try:
            act()
        except ModelswapError as error:
            return error
        if fault is Fault.FLIP and self.live:
            victim = sorted(self.live)[0]
            self.live[victim] = bytes([self.live[victim][0] ^ 1]) + self.live[victim][1:]
        if fault is Fault.DIE_AFTER:
            self.kill()
            self._need(self._alive, name)
        if fault is Fault.LOSE:
            self.lost.add(self._size - 1)
        self._need(not self.lost or name == "load", name)
        return self.error if fault is Fault.LATE_ERROR else None

    def _fetch(self, tensors: Sequence[TensorRange]) -> Tensors:
        found = {tensor.name: self._read(tensor) if tensor.path else self._held(tensor.name) for tensor in tensors}
        for tensor in tensors:
            if sha256(found[tensor.name]) != tensor.sha256:
                raise ManifestMismatch(f"tensor {tensor.name}: the bytes are not those of the manifest")
        return found

    def _held(self, name: str) -> bytes:
        return self.inbox[1].pop(name, self.live[name]) if self.inbox is not None else self.live[name]

    def _need(self, alive: bool, step: str) -> None:
        if not alive:
            raise WorkerLost(f"the worker is dead ({step})")

    def _law(self, legal: bool, step: str) -> None:
        if self._alive and not legal:
            state = Counter({"staged": bool(self.staged), "paused": bool(self.paused), "loaded": bool(self.live)})
            self.violations.append(f"{step} is not legal now: {dict(state)}, last steps {self.steps[-6:]}")


def _size(tensors: Tensors) -> int:
    return sum(len(data) for data in tensors.values())
