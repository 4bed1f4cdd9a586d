"""The worker processes of one replica: one, or the ranks that a model is split over. They live and die together.

A rank whose peer is gone cannot make a step, and what it holds is of no use to a new peer; so when one is lost the
others are ended, and the replica starts again as a whole. Knows nothing of other replicas.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.process import CallOff, WorkerProcess
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.embedded.streams import Streams, TokenStream
from modelswap_engine.backends.port import Generate


class WorkerGroup:
    """One replica.

    Args:
        replica: its number.
        settings: of the engine.
        on_lost: called with each rank that is gone without having been stopped.
        environ: the environment of its processes.

    Attributes:
        serving: True from a load until the replica is lost or loaded anew.
        streams: its open generations.
        starts: how often its processes were started.
        adapters: those that it holds.
        slots: the adapters that it can compute with now, by slot.
    """

    def __init__(
        self,
        replica: int,
        settings: EmbeddedSettings,
        *,
        on_lost: Callable[[int], None],
        environ: Mapping[str, str],
    ) -> None:
        self.replica = replica
        self.streams = Streams()
        self.serving = False
        self.starts = 0
        self.adapters: set[str] = set()
        self.slots: dict[int, str] = {}
        self._settings = settings
        self._on_lost = on_lost
        self._environ = environ
        self._workers: list[WorkerProcess] = []
        self._folder: Path | None = None
        self._beat: asyncio.Task[None] | None = None

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """Its processes, by rank."""
        return self._workers

    @property
    def alive(self) -> bool:
        """True while every rank answers."""
        return bool(self._workers) and all(worker.alive for worker in self._workers)

    async def start(self) -> None:
        """Start the processes anew, without weights; what is left of earlier ones is ended.

        Raises:
            WorkerLost: one did not come up in time; none is left.
        """
        await self.stop("it is started again")
        size = self._settings.tensor_parallel
        if size > 1:
            self._folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="modelswap-ranks-"))
        self.starts += 1
        self.forget_adapters()
        self._workers = [self._worker(index, size) for index in range(size)]
        outcomes = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self.kill("another rank did not come up")
                raise outcome
        self._beat = asyncio.create_task(self._watch(), name=f"heartbeat-{self.replica}")

    def forget_adapters(self) -> None:
        """It holds none any more."""
        self.adapters.clear()
        self.slots.clear()

    def _worker(self, index: int, size: int) -> WorkerProcess:
        store = str(self._folder / "store") if self._folder is not None else ""
        return WorkerProcess(
            self.replica * size + index,
            self._settings,
            seat=wire.Seat(index=index, size=size, store=store) if size > 1 else None,
            on_tokens=self.streams.deliver,
            on_lost=self._lost,
            environ=self._environ,
        )

    def _lost(self, worker: WorkerProcess, message: str) -> None:
        self.serving = False
        self.kill(f"rank {worker.rank} of the same model was lost")
        self.streams.fail_all(message)
        self._on_lost(worker.rank)

    def kill(self, why: str) -> None:
        """End every process at once."""
        self.serving = False
        for worker in self._workers:
            if worker.running:
                worker.kill(why)

    async def stop(self, why: str) -> None:
        """End every process; requests still running end with an error."""
        self.serving = False
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self.streams.fail_all(why)
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def ask(
        self, build: Callable[[int], wire.Order], *, timeout: float, what: str, call_off: CallOff | None = None
    ) -> list[wire.Event | BaseException]:
        """Ask every rank at once; return what each answered, or how it failed, when all have."""
        calls = (worker.call(build, timeout=timeout, what=what, call_off=call_off) for worker in self._workers)
        return list(await asyncio.gather(*calls, return_exceptions=True))

    def generate(self, request: Generate) -> TokenStream:
        """Run a prompt on the first rank, which hands it on to the others."""
        first = self._workers[0]
        key, stream = self.streams.open(request, abort=lambda request_id: first.send(wire.Abort(request_id=request_id)))
        first.send(wire.Submit(request=msgspec.structs.replace(request, request_id=key)))
        for other in self._workers[1:]:
            other.send(wire.Wake())
        return stream

    async def _watch(self) -> None:
        """Ask each rank now and then whether it still answers; one that does not is lost."""
        while True:
            await asyncio.sleep(self._settings.heartbeat_seconds)
            await self.ask(
                lambda call: wire.MemoryCall(call=call),
                timeout=self._settings.call_timeout,
                what="being asked whether it is alive",
            )
