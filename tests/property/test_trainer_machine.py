"""Random lives of a trainer's updates: begun, filled, committed, given up, out of time, lost, in any order.

Nothing that was sent is live before its commit; a commit makes live exactly what was sent over what was live, under its
own content digest, or changes nothing; what was never saved is gone with the process that had it, and then the version
below it serves. Nothing stays behind in the engine.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelswap_engine.protocol.errors import Busy, ModelswapError, NotFound, WorkerLost
from modelswap_engine.protocol.policy import Traffic, TrafficMode
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.updates import AbortUpdate, BeginUpdate, CommitUpdate, DiskPart
from tests.support.fake_backend import Fault
from tests.support.fake_source import FakeCheckpoint
from tests.support.swapping import World, checkpoint, request
from tests.support.tensor_files import written

SIZES = {"embed": 8, "q": 4, "k": 4, "norm": 2}
OTHER = checkpoint(embed=b"O" * 8, q=b"O" * 4, norm=b"O" * 2)
BOUNDS: dict[str, Any] = {
    "call_seconds": 5.0,
    "pause_seconds": 5.0,
    "stage_seconds": 20.0,
    "load_seconds": 20.0,
    "probe_seconds": 3.0,
}
BOUNDS["retry_seconds"] = (0.5, 2.0)
LONGEST_RETRY = 4.0
LEASE = 60.0

steps = st.sampled_from(["stage", "prepare", "pause", "commit", "verify", "resume"])
kinds = st.sampled_from([Fault.ERROR, Fault.LATE_ERROR, Fault.DIE])
names = st.sets(st.sampled_from(sorted(SIZES)), min_size=1)
modes = st.sampled_from([TrafficMode.DRAIN, TrafficMode.RECOMPUTE, TrafficMode.FREEZE, TrafficMode.ABORT])


class Trainer(RuleBasedStateMachine):
    """One pod on fakes, and what must be true of it.

    Attributes:
        root: the content that a lost engine comes back with.
        live: the content that answers.
        sent: what has arrived of the open update, None when none is open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.numbers = iter(range(1, 10_000))
        self.root = self.live = dict(checkpoint().tensors)
        self.sent: dict[str, bytes] | None = None
        self.held = False  # by the engine: what came as bytes
        self.update = ""

    def run(self, work):
        return self.runner.run(work)

    @initialize()
    def start(self):
        async def begin():
            self.world = World(Path(self.folder.name) / "pod", **BOUNDS)
            self.other = self.world.publish("other", OTHER)
            await self.world.start()

        self.run(begin())

    @precondition(lambda self: self.sent is None)
    @rule(mode=modes)
    def it_begins(self, mode):
        self.update, self.sent, self.held = f"u{next(self.numbers)}", {}, False
        order = BeginUpdate(update_id=self.update, seconds=LEASE, traffic=Traffic(mode=mode))
        self.run(self.world.clock.run(self.world.coordinator.updates.begin(order)))

    @precondition(lambda self: self.sent is not None)
    @rule(which=names)
    def tensors_arrive(self, which):
        number = next(self.numbers)
        tensors = {name: bytes([number % 251]) * SIZES[name] for name in which}
        file = written(Path(self.folder.name) / f"{number}.safetensors", tensors)
        self.run(self.world.clock.run(self.world.coordinator.parts.tensors(self.update, file, owner="")))
        file.unlink()
        self.sent |= tensors
        self.held = True

    @precondition(lambda self: self.sent is not None)
    @rule(which=names)
    def tensors_of_a_checkpoint_arrive(self, which):
        part = DiskPart(uri=self.other.uri, names=tuple(sorted(which)))
        self.run(self.world.clock.run(self.world.coordinator.parts.disk(self.update, part)))
        self.sent |= {name: OTHER.tensors[name] for name in which}

    @precondition(lambda self: self.sent is not None)
    @rule(fault=st.none() | st.tuples(steps, kinds))
    def it_commits(self, fault):
        wanted = self.live | self.sent
        if fault is not None:
            self.world.backend.faults[fault[0]] = fault[1]
        order = CommitUpdate(digest=FakeCheckpoint(wanted).digest)
        status = self.run(self.world.clock.run(self.world.coordinator.updates.commit(self.update, order)))
        self.world.backend.faults.clear()
        assert fault is not None or status.state is SwapState.SERVING
        assert status.state is not SwapState.QUARANTINED or self.live != self.root
        if status.state is SwapState.SERVING:
            self.live = wanted
        elif fault is not None and fault[1] is Fault.DIE:
            self.live = self.root  # what nobody saved was in that worker
        self.sent = None
        self.run(self.world.clock.advance(LONGEST_RETRY if fault is not None else 0))

    @precondition(lambda self: self.sent is not None)
    @rule()
    def it_gives_up(self):
        self.run(self.world.clock.run(self.world.coordinator.updates.abort(self.update, AbortUpdate())))
        self.sent = None

    @precondition(lambda self: self.sent is not None)
    @rule()
    def nothing_comes_any_more(self):
        self.run(self.world.clock.advance(LEASE + 5))
        self.sent = None

    @rule()
    def a_swap_is_wanted(self):
        order = request(self.other, f"swap-{next(self.numbers)}", owner="cli", revision=next(self.numbers))

        async def swap():
            await self.world.clock.run(self.world.coordinator.swap(order))
            return await self.world.ended(order.operation_id)

        if self.sent is not None:
            try:
                self.run(swap())
                raise AssertionError("a swap went beside an open update")
            except Busy:
                return
        assert self.run(swap()).state is SwapState.SERVING
        self.root = self.live = dict(OTHER.tensors)

    @rule()
    def the_worker_dies(self):
        self.world.backend.kill()
        self.run(self.world.clock.advance(LONGEST_RETRY))
        self.live = self.root
        if self.sent is not None:
            try:
                self.run(self.world.clock.run(self.world.coordinator.updates.commit(self.update, CommitUpdate())))
                raise AssertionError("what was sent outlived the worker that had it")
            except WorkerLost:
                self.sent = None

    @rule()
    def the_process_dies(self):
        async def life():
            await self.world.crash()
            await self.world.start()

        self.run(life())
        self.live, self.sent = self.root, None

    @precondition(lambda self: self.update and self.sent is None)
    @rule()
    def a_late_part_is_refused(self):
        part = DiskPart(uri=self.other.uri, names=("norm",))
        try:
            self.run(self.world.clock.run(self.world.coordinator.parts.disk(self.update, part)))
            raise AssertionError("a part arrived after the end")
        except NotFound:
            pass
        except ModelswapError as error:
            raise AssertionError(f"{error.code}: {error.message}") from error

    @invariant()
    def nothing_is_live_but_what_was_committed(self):
        if not hasattr(self, "world"):
            return
        self.run(self.world.clock.settle())
        world, state = self.world, self.world.state
        assert state.live is not None
        assert (world.backend.live, state.live.digest) == (self.live, FakeCheckpoint(self.live).digest)
        assert (state.ready, state.gate.open) == (True, True), (state.reason, state.message)
        assert world.backend.violations == []
        assert world.backend.staged is None
        assert (state.update is not None) == (self.sent is not None)
        assert (world.backend.inbox is not None) == (self.sent is not None and self.held)

    def teardown(self):
        if hasattr(self, "world"):
            self.run(self.world.stop())
        self.runner.close()
        self.folder.cleanup()


TestTrainer = Trainer.TestCase
TestTrainer.settings = settings(
    max_examples=30,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
