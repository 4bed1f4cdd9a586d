"""An engine's control side in memory, with our half in its ranks given as functions from text to text.

It stands in for a real engine in unit tests of the engine-neutral half, and nowhere else. It keeps the promises of
``EngineControl`` and notes every call; it can be told to fail or hang at the next call of a kind.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import TypeVar

from msgspec.structs import replace

from modelswap_engine.backends.external.control import Continued, EngineFacts
from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.errors import BadRequest, NotReady, WorkerLost

T = TypeVar("T")
Rank = Callable[[str], str]
ANSWER = 7


class Broken(Enum):
    """What goes wrong at a call, once."""

    UNREACHABLE = auto()  # nothing was sent
    LOST_BEFORE = auto()  # no answer, and it was not carried out
    LOST_AFTER = auto()  # no answer, and it was carried out
    REFUSED = auto()  # the engine says no
    HANG = auto()  # no answer, ever


class FakeControl:
    """See the module.

    Attributes:
        ranks: our half in each rank; none means that it is not installed.
        calls: the names of all calls so far.
        running: requests that the engine works on; while there are any a flush says no.
        flushes: answers of the next flushes, before ``running`` decides.
        broken: what goes wrong at the next call of a name.
        on_load: told the digest when the engine loads a whole version.
        lose: says of a collective call whether and how it goes wrong.
        logprob: how likely every token of its answers is to its weights.
        answers: changes what the ranks answered, on its way.
    """

    def __init__(self, ranks: Sequence[Rank] = (), *, engine: str = "fake") -> None:
        self.ranks = list(ranks)
        self.calls: list[str] = []
        self.running = 0
        self.flushes: list[bool] = []
        self.broken: dict[str, Broken] = {}
        self.starts = 1
        self.up = True
        self.policy: RequestPolicy | None = None
        self.loaded = ""
        self.on_load: Callable[[str], None] = lambda digest: None
        self.closed = False
        self.logprob: Callable[[], float] = lambda: -1.0
        self.paused_with: list[RequestPolicy] = []
        self.lose: Callable[[str], Broken | None] = lambda text: None
        self.answers: Callable[[list[str]], list[str]] = lambda answers: answers
        self._transport_broken = False
        self._facts = EngineFacts(
            engine=engine,
            version="1.0",
            boot_id="",
        )

    @property
    def boot_id(self) -> str:
        return f"boot-{self.starts}"

    @property
    def weight_version(self) -> str:
        return self._facts.weight_version

    def restart(self, ranks: Sequence[Rank] = ()) -> None:
        """Another start of the engine, with other processes."""
        self.starts += 1
        self.up = True
        self.ranks = list(ranks)
        self.policy = None
        self.running = 0
        self._transport_broken = False

    def requests(self) -> "FakeRequests":
        """Return the requests of clients in this engine."""
        return FakeRequests(self)

    async def facts(self, *, seconds: float) -> EngineFacts:
        def answer() -> EngineFacts:
            size = max(1, len(self.ranks))
            return replace(self._facts, boot_id=self.boot_id, ranks=size, agent=bool(self.ranks))

        return await self._call("facts", answer, seconds=seconds)

    async def alive(self, *, seconds: float) -> bool:
        return self.up

    async def pause(self, policy: RequestPolicy, *, seconds: float) -> None:
        def act() -> None:
            self.policy = policy
            self.paused_with.append(policy)

        await self._call("pause", act, seconds=seconds)

    async def resume(self, *, seconds: float) -> None:
        def act() -> None:
            self.policy = None

        await self._call("resume", act, seconds=seconds)

    async def paused(self, *, seconds: float) -> bool:
        return await self._call("paused", lambda: self.policy is not None, seconds=seconds)

    async def flush(self, *, seconds: float) -> bool:
        def act() -> bool:
            return self.flushes.pop(0) if self.flushes else not self.running or self.policy is not None

        return await self._call("flush", act, seconds=seconds)

    async def call_all(self, text: str, *, seconds: float) -> Sequence[str]:
        if self._transport_broken:
            raise WorkerLost("an earlier collective call failed")
        if not self.ranks:
            raise BadRequest("our half is not installed in this engine")
        try:
            found = self.lose(text)
            if found is not None:
                self.broken["call_all"] = found
            return await self._call(
                "call_all", lambda: self.answers([rank(text) for rank in self.ranks]), seconds=seconds
            )
        except WorkerLost:
            self._transport_broken = True
            raise

    async def set_version(self, digest: str, *, seconds: float) -> None:
        await self._call("set_version", lambda: self.label(digest), seconds=seconds)

    def label(self, digest: str) -> None:
        """Call the weights so."""
        self._facts = replace(self._facts, weight_version=digest)

    async def load_full(self, directory: str, digest: str, *, seconds: float) -> None:
        def act() -> None:
            self.loaded = directory
            self.on_load(digest)
            self.label(digest)

        await self._call("load_full", act, seconds=seconds)

    async def continued(self, text: str, *, tokens: int, logprobs: bool, seconds: float) -> Continued:
        def answer() -> Continued:
            told = (self.logprob(),) * tokens if logprobs else ()
            return Continued(prompt=tuple(text.encode()), answer=(ANSWER,) * tokens, logprobs=told)

        return await self._call("continued", answer, seconds=seconds)

    async def logprobs(self, tokens: Sequence[int], *, seconds: float) -> Sequence[float]:
        def answer() -> list[float]:
            return [self.logprob() if token == ANSWER else -50.0 for token in (*tokens[1:], ANSWER)]

        return await self._call("logprobs", answer, seconds=seconds)

    async def close(self) -> None:
        self.closed = True

    async def _call(self, name: str, act: Callable[[], T], *, seconds: float) -> T:
        self.calls.append(name)
        broken = self.broken.pop(name, None)
        if not self.up or broken is Broken.UNREACHABLE:
            raise NotReady("the engine cannot be reached")
        if broken is Broken.REFUSED:
            raise BadRequest(f"the engine refuses {name}")
        if broken is Broken.HANG:
            try:
                await asyncio.wait_for(asyncio.Event().wait(), seconds)
            except TimeoutError:
                raise WorkerLost(f"no answer to {name}") from None
        if broken is Broken.LOST_BEFORE:
            raise WorkerLost(f"no answer to {name}")
        result = act()
        if broken is Broken.LOST_AFTER:
            raise WorkerLost(f"no answer to {name}")
        return result


class FakeRequests:
    """The requests of clients in an engine: those that it runs."""

    def __init__(self, control: FakeControl) -> None:
        self._control = control

    def running(self) -> int:
        return self._control.running

    def end(self) -> int:
        ended, self._control.running = self._control.running, 0
        return ended

    @contextlib.contextmanager
    def barred(self) -> Iterator[None]:
        self._control.calls.append("barred")
        yield
