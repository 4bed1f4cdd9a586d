"""One worker process as the front sees it: started, spoken to, and noticed when it is gone.

Knows the wire, not what the messages mean.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from modelswap_engine.backends.embedded import wire
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.backends.port import Tokens
from modelswap_engine.protocol.errors import Unavailable, WorkerLost

_MODULE: Final = "modelswap_engine.backends.embedded.worker"
_SOURCE_ROOT: Final = Path(__file__).resolve().parents[3]
_STOP_SECONDS: Final = 5.0
_CALL_OFF_SECONDS: Final = 5.0
_OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Waiting compute threads sleep instead of spinning: the front, staging and hashing need the same cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Threads come and go with each staging; without a bound each could leave an arena of freed memory behind.
    "MALLOC_ARENA_MAX": "4",
    # Fresh memory in large pages: faulting in small ones takes as long as hashing what is read into them.
    "THP_MEM_ALLOC_ENABLE": "1",
    # The ranks of a split model talk over the loopback interface; gloo would listen on the pod's own address.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_GRAPH_MIXING_SUPPORT": "0",
}


@dataclasses.dataclass(frozen=True)
class CallOff:
    """How to call a call off: the message, by the call's number, and the error that says so.

    A worker that does not let go in time is left alone, because it serves; with ``expendable`` it is killed.
    """

    order: Callable[[int], wire.Order]
    error: type[Unavailable]
    advice: str
    expendable: bool = False


class WorkerProcess:
    """A worker of one rank.

    Args:
        rank: its number.
        settings: of the engine.
        seat: its place among the ranks of a split model.
        on_tokens: takes what generations produce.
        on_lost: called once when the process is gone without having been stopped.
        environ: the environment it inherits.
    """

    def __init__(
        self,
        rank: int,
        settings: EmbeddedSettings,
        *,
        seat: wire.Seat | None,
        on_tokens: Callable[[Tokens], None],
        on_lost: Callable[["WorkerProcess", str], None],
        environ: Mapping[str, str],
    ) -> None:
        self.rank = rank
        self.boot_id = ""
        self.pid = 0
        self._settings = settings
        self._seat = seat
        self._on_tokens = on_tokens
        self._on_lost = on_lost
        self._environ = environ
        self._waiting: dict[int, asyncio.Future[wire.Event]] = {}
        self._calls = 0
        self._stopping = False
        self._killed = False
        self._why = ""
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """True while the process answers: from its greeting until it is gone."""
        return self.running and bool(self.boot_id)

    @property
    def running(self) -> bool:
        """True while there is a process, though it may not have imported everything yet."""
        return self._listener is not None and not self._listener.done() and not self._killed

    async def start(self) -> None:
        """Start the process and wait until it has imported everything.

        Raises:
            WorkerLost: it did not come up in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _MODULE,
                str(theirs.fileno()),
                str(os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=self._child_environment(),
            )
        self.pid = self._process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self.send(wire.Setup(rank=self.rank, settings=self._settings, seat=self._seat))
        greeting: asyncio.Future[wire.Event] = asyncio.get_running_loop().create_future()
        self._waiting[0] = greeting
        self._listener = asyncio.create_task(self._listen(reader), name=f"worker-{self.rank}")
        try:
            await self._within(greeting, self._settings.start_timeout, "starting")
        finally:
            self._waiting.pop(0, None)

    def _child_environment(self) -> dict[str, str]:
        paths = [str(_SOURCE_ROOT), *filter(None, [self._environ.get("PYTHONPATH")])]
        return {
            **self._environ,
            **_OFFLINE,
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def send(self, order: wire.Order) -> None:
        """Send a message that has no answer; to a lost worker it goes nowhere."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.frame(order))

    async def call(
        self, build: Callable[[int], wire.Order], *, timeout: float, what: str, call_off: CallOff | None = None
    ) -> wire.Event:
        """Send a call and wait for its answer.

        With ``call_off`` a call that takes too long, or that nobody waits for any more, is called off; the worker,
        which serves, stays.

        Raises:
            WorkerLost: the process is gone, or did not answer within ``timeout`` seconds and was killed.
            Unavailable: of the type that ``call_off`` names, after ``timeout`` seconds.
        """
        if not self.alive:
            raise self._lost()
        self._calls += 1
        number = self._calls
        answer: asyncio.Future[wire.Event] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self.send(build(number))
        try:
            if call_off is None:
                return await self._within(answer, timeout, what)
            return await self._at_most(answer, number, timeout, what, call_off)
        finally:
            self._waiting.pop(number, None)

    async def _within(self, answer: asyncio.Future[wire.Event], timeout: float, what: str) -> wire.Event:
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise await self._given_up(timeout, what) from None

    async def _given_up(self, timeout: float, what: str) -> WorkerLost:
        self.kill(f"it did not answer within {timeout:g} s while {what}")
        await self._reaped()
        return self._lost()

    async def _at_most(
        self, answer: asyncio.Future[wire.Event], number: int, timeout: float, what: str, call_off: CallOff
    ) -> wire.Event:
        try:
            await asyncio.wait({answer}, timeout=timeout)
            if answer.done():
                return answer.result()
        except asyncio.CancelledError:
            self.send(call_off.order(number))
            raise
        self.send(call_off.order(number))
        # Its answer means that it has let go of what it held.
        await asyncio.wait({answer}, timeout=_CALL_OFF_SECONDS)
        if answer.done():
            answer.result()  # raises when the worker was lost meanwhile
        elif not self.alive:
            raise self._lost()
        elif call_off.expendable:
            raise await self._given_up(timeout, what)
        raise call_off.error(
            f"{what} took longer than {timeout:g} s and was called off",
            advice=call_off.advice,
            details={"rank": str(self.rank), "seconds": f"{timeout:g}"},
        )

    def _lost(self) -> WorkerLost:
        return WorkerLost(
            f"the worker of rank {self.rank} (pid {self.pid}) is gone: {self._why or 'it was stopped'}",
            advice="it is restarted with the next load",
            details={"rank": str(self.rank), "pid": str(self.pid)},
        )

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header = await reader.readexactly(wire.HEADER.size)
                self._take(wire.decode_event(await reader.readexactly(wire.length_of(header))))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            if isinstance(error, ValueError):
                self._why = self._why or f"it sent something unreadable: {error}"
        finally:
            self.kill()
            await self._gone()

    def _take(self, event: wire.Event) -> None:
        match event:
            case wire.Produced(tokens=tokens):
                self._on_tokens(tokens)
            case wire.Hello(boot_id=boot_id):
                self.boot_id = boot_id
                self._resolve(0, event)
            case wire.Dying(message=message):
                self._why = message
            case (
                wire.Answer(call=number)
                | wire.HashesAnswer(call=number)
                | wire.TransferAnswer(call=number)
                | wire.MemoryAnswer(call=number)
            ):
                self._resolve(number, event)

    def _resolve(self, number: int, event: wire.Event) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result(event)

    async def _gone(self) -> None:
        await self._reaped()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._lost())
        if not self._stopping:
            self._on_lost(self, self._lost().message)

    async def _reaped(self) -> None:
        if self._process is None:
            return
        try:
            code = await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except TimeoutError:
            # Stuck in the kernel, on a volume that hangs; the kill takes effect when it comes back.
            self._why = self._why or f"it was killed and did not end within {_STOP_SECONDS:g} s"
            return
        self._why = self._why or (f"killed by signal {-code}" if code < 0 else f"it ended with exit code {code}")

    def kill(self, why: str = "") -> None:
        """Kill the process, if it still runs; ``why`` is what others are told of it."""
        self._killed = True
        self._why = self._why or why
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            # Not Process.kill(): it polls first, and so takes the exit status away from asyncio's own watcher.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the process: it leaves when its socket closes, and is killed if it does not."""
        self._stopping = True
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
            except TimeoutError:
                self.kill()
        if self._listener is not None:
            await asyncio.gather(self._listener, return_exceptions=True)
