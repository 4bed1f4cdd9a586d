"""The worker process: reads orders from the front's socket, and dies with it.

Started as ``python -m modelswap_engine.backends.embedded.worker FD PARENT_PID``. The main thread only reads; control
calls run one at a time in a thread of theirs, hashing in another one, and one thread writes. Nothing here outlives the
front: the end of the socket ends the process, and so does the death of the parent.
"""

import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Final, NoReturn

import torch

from modelswap_engine.backends.embedded import faults, wire
from modelswap_engine.backends.embedded.device import place_of
from modelswap_engine.backends.embedded.lora.calls import AdapterCalls
from modelswap_engine.backends.embedded.rank import Rank
from modelswap_engine.backends.embedded.rank_swaps import RankSwaps
from modelswap_engine.backends.embedded.team import Team, TeamBrokenError, join
from modelswap_engine.backends.embedded.transfer.calls import Transfers
from modelswap_engine.backends.embedded.transfer.rank_transfers import RankTransfers
from modelswap_engine.backends.port import Reply, Tokens
from modelswap_engine.protocol.errors import ErrorBody, Internal, ModelswapError
from modelswap_engine.weights.pace import Pace

_PR_SET_PDEATHSIG: Final = 1
_LAST_WORDS_SECONDS: Final = 2.0
EXIT_LOOP_DIED: Final = 70
_log = logging.getLogger("modelswap.worker")


class Connection:
    """The socket to the front: frames in, frames out through one writing thread."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._outgoing: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="write", daemon=True).start()

    def send(self, message: wire.Event) -> None:
        """Queue a message; never blocks, so the generation thread may call it."""
        self._outgoing.put(wire.frame(message))

    def flush(self, timeout: float) -> None:
        """Wait until what was queued is written."""
        done = threading.Event()
        self._outgoing.put(done)
        done.wait(timeout)

    def _write(self) -> None:
        while True:
            item = self._outgoing.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._socket.sendall(item)
            except OSError:
                os._exit(0)

    def receive(self) -> wire.Order | None:
        """Return the next message, or None when the front is gone."""
        header = self._exactly(wire.HEADER.size)
        body = self._exactly(wire.length_of(header)) if header else b""
        return wire.decode_order(body) if body else None

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            piece = self._socket.recv(min(size - len(parts), 1 << 20))
            if not piece:
                return b""
            parts += piece
        return bytes(parts)


class Worker:
    """Dispatches orders to a rank."""

    def __init__(self, connection: Connection, rank: Rank) -> None:
        self._connection = connection
        self._rank = rank
        self._swaps = swaps = RankSwaps(rank)
        self._control: queue.SimpleQueue[tuple[wire.ControlCall, Pace]] = queue.SimpleQueue()
        self._inquiries: queue.SimpleQueue[tuple[wire.HashesCall, Pace]] = queue.SimpleQueue()
        self._paces: dict[int, Pace] = {}
        self._transfers = Transfers(
            rank, RankTransfers(rank, flush=swaps.flush_cache), send=connection.send, describe=error_body
        )
        self._adapters = AdapterCalls(rank, send=connection.send, error_body=error_body)
        threading.Thread(target=self._run_control, name="control", daemon=True).start()
        threading.Thread(target=self._run_inquiries, name="inquiries", daemon=True).start()

    def dispatch(self, order: wire.Order) -> None:
        """Take one order; returns at once."""
        match order:
            case wire.Submit(request=request):
                self._rank.submit(request)
            case wire.Abort(request_id=request_id):
                self._rank.abort(request_id)
            case wire.MemoryCall(call=call):
                self._connection.send(wire.MemoryAnswer(call=call, memory=self._rank.memory()))
            case wire.Wake():
                self._rank.wake()
            case wire.HashesCall(call=call):
                self._inquiries.put((order, self._keep(call, self._rank.pace(order.bytes_per_second))))
            case wire.CancelCall(call=call):
                if (running := self._paces.get(call)) is not None:
                    running.cancel()
            case wire.LoadAdapterCall() | wire.PlaceAdapterCall() | wire.ClearSlotCall() | wire.DropAdapterCall():
                self._adapters.take(order)
            case wire.CancelAdapter(call=call):
                self._adapters.cancel(call)
            case wire.CancelStage(operation_id=operation_id):
                self._swaps.cancel_staging(operation_id)
            case wire.TransferCall():
                self._transfers.submit(order)
            case wire.CancelTransfer(call=call):
                self._transfers.cancel(call)
            case wire.Setup():
                raise ValueError("a worker is set up once")
            case _:
                if isinstance(order, wire.ReleaseCall | wire.SettleCall):
                    self._swaps.cancel_staging(order.operation_id)
                self._control.put((order, self._keep(order.call, Pace())))

    def _keep(self, call: int, pace: Pace) -> Pace:
        self._paces[call] = pace
        return pace

    def _run_control(self) -> None:
        while True:
            order, pace = self._control.get()
            facts: wire.ModelFacts | None = None
            try:
                if isinstance(order, wire.LoadCall):
                    reply, facts = self._swaps.load(order.order, pace=pace)
                else:
                    reply = self._act(order, pace)
            except Exception as error:  # noqa: BLE001  # a rank answers, whatever happens
                if isinstance(error, TeamBrokenError):
                    self._rank.give_up(str(error))
                reply = Reply(
                    operation_id=_operation_of(order),
                    rank=self._rank.number,
                    boot_id=self._rank.boot_id,
                    error=error_body(error),
                )
            del self._paces[order.call]
            self._connection.send(wire.Answer(call=order.call, reply=reply, facts=facts))

    def _act(self, order: wire.SwapCall, pace: Pace) -> Reply:
        swaps = self._swaps
        match order:
            case wire.StageCall(order=wanted) | wire.StageRetainedCall(order=wanted):
                return swaps.stage(wanted)
            case wire.TryOutCall(operation_id=operation_id, trials=trials):
                return swaps.try_out(operation_id, trials)
            case wire.PrepareCall(operation_id=operation_id, overlap=overlap):
                return swaps.prepare(operation_id, overlap=overlap)
            case wire.PauseCall(operation_id=operation_id, timeout=timeout):
                return swaps.pause(operation_id, timeout)
            case wire.CommitCall(operation_id=operation_id, policy=policy):
                return swaps.commit(operation_id, policy)
            case wire.RetireCall(operation_id=operation_id):
                return swaps.retire(operation_id)
            case wire.VerifyCall(operation_id=operation_id, strict=strict):
                return swaps.verify(operation_id, strict=strict, pace=pace)
            case wire.RollbackCall(operation_id=operation_id):
                return swaps.rollback(operation_id)
            case wire.ResumeCall(operation_id=operation_id):
                return swaps.resume(operation_id)
            case wire.ReleaseCall(operation_id=operation_id, previous=previous):
                return swaps.release(operation_id, previous=previous)
            case wire.SettleCall(operation_id=operation_id):
                return swaps.settle(operation_id)

    def _run_inquiries(self) -> None:
        while True:
            order, pace = self._inquiries.get()
            try:
                answer = wire.HashesAnswer(call=order.call, hashes=self._rank.hashes(order.pattern, pace=pace))
            except Exception as error:  # noqa: BLE001  # a rank answers, whatever happens
                answer = wire.HashesAnswer(call=order.call, error=error_body(error))
            del self._paces[order.call]
            self._connection.send(answer)


def _operation_of(order: wire.ControlCall) -> str:
    if isinstance(order, wire.LoadCall | wire.StageCall | wire.StageRetainedCall):
        return order.order.operation_id
    return order.operation_id


def error_body(error: Exception) -> ErrorBody:
    """Return an error as it travels; a defect is logged with its traceback, and told without."""
    if isinstance(error, ModelswapError):
        return error.body()
    _log.error("defect in the worker", exc_info=error)
    return Internal(
        f"{type(error).__name__}: {error}", advice="this is a defect; the worker's log has the traceback"
    ).body()


def _team(setup: wire.Setup, *, died: Callable[[str], None]) -> Team | None:
    if setup.seat is None:
        return None
    try:
        return _joined(setup.seat, setup)
    except Exception as error:
        _log.error("the ranks did not meet", exc_info=error)
        died(f"it did not find the other ranks of its model: {error}")
        raise


def _joined(seat: wire.Seat, setup: wire.Setup) -> Team:
    settings = setup.settings
    return join(
        seat,
        place_of(settings.device, rank=setup.rank).device,
        start_seconds=settings.start_timeout,
        seconds=settings.peer_timeout,
        load_seconds=settings.load_timeout,
    )


def _emit(connection: Connection, wanted: str, *, rank: int) -> Callable[[Tokens], None]:
    """Return what hands tokens on; each one passes here, so that nothing is looked for where no fault is asked for."""

    def emit(tokens: Tokens) -> None:
        connection.send(wire.Produced(tokens=tokens))

    if not wanted:
        return emit
    injected = faults.Faults(wanted, rank=rank)  # its own: control calls pass their points meanwhile, in another thread

    def faulty(tokens: Tokens) -> None:
        injected.hit("token")
        emit(tokens)

    return faulty


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, and ignore the terminal's interrupt."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> NoReturn:
    """Run until the front is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    logging.basicConfig(level=logging.WARNING, format="worker: %(name)s: %(message)s", stream=sys.stderr)
    connection = Connection(descriptor)
    setup = connection.receive()
    if not isinstance(setup, wire.Setup):
        os._exit(0)
    settings = setup.settings
    torch.set_num_threads(settings.torch_threads or max(1, len(os.sched_getaffinity(0)) // settings.ranks))
    torch.seed()  # or what is drawn without a seed would be the same in each process

    def died(message: str) -> None:
        connection.send(wire.Dying(message=message))
        connection.flush(_LAST_WORDS_SECONDS)
        os._exit(EXIT_LOOP_DIED)

    wanted = os.environ.get(faults.VARIABLE, "")
    boot_id = uuid.uuid4().hex
    rank = Rank(
        number=setup.rank,
        boot_id=boot_id,
        settings=settings,
        faults=faults.Faults(wanted, rank=setup.rank),
        emit=_emit(connection, wanted, rank=setup.rank),
        died=died,
        team=_team(setup, died=died),
    )
    worker = Worker(connection, rank)
    connection.send(wire.Hello(boot_id=boot_id, pid=os.getpid()))
    with contextlib.suppress(ConnectionError):
        while (order := connection.receive()) is not None:
            worker.dispatch(order)
    os._exit(0)


if __name__ == "__main__":
    main()
