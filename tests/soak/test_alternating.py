"""Hundreds of swaps back and forth under load, with failures at random steps: nobody notices, and nothing grows.

The faults are drawn from a seed: some steps of the worker raise, some swaps are cancelled, some versions are damaged.
"""

import asyncio
import itertools
import random
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.protocol.messages import CancelRequest, Fence, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.policy import Loading
from modelswap_engine.protocol.states import SwapState
from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.clients import honest, load_on, makers
from tests.support.models import disjoint_pair, flip_byte
from tests.support.serve import Served

pytestmark = [pytest.mark.model, pytest.mark.timeout(7200)]

QUESTIONS = [f"Question {number}: what is the capital of France?" for number in range(32)]
_POINTS = ("stage", "prepare", "pause", "commit", "midway", "verify")


def faults(draw: random.Random, swaps: int) -> str:
    """Return about one fault for each twenty swaps, at random steps and times."""
    chosen = [(draw.choice(_POINTS), draw.randrange(2, max(3, swaps))) for _ in range(max(3, swaps // 20))]
    return ",".join(f"{point}:raise#{number}" for point, number in sorted(set(chosen)))


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two versions of about 3 MB of which half changes, and a damaged copy of the second one."""
    pair = disjoint_pair(tmp_path / "models", layers=2, hidden=256)
    bad = Path(shutil.copytree(pair.new, tmp_path / "models" / "bad"))
    flip_byte(bad, "lm_head.weight", position=5)
    return pair.old, pair.new, bad


class Swaps:
    """Makes one swap after the other."""

    def __init__(self, served: Served, versions: tuple[Path, Path, Path], draw: random.Random) -> None:
        self._served = served
        self._old, self._new, self._bad = versions
        self._digests = {folder: build_manifest(folder).digest for folder in (self._old, self._new)}
        self._draw = draw
        self._numbers = itertools.count(1)
        self.states: Counter[SwapState] = Counter()
        self.live = self._old

    def one(self) -> None:
        """Swap to the other version, in one of several ways; whatever comes of it must be a whole version."""
        target = self._new if self.live == self._old else self._old
        kind = self._draw.random()
        operation = f"soak-{next(self._numbers)}"
        if kind < 0.03:
            # The content that is pinned is not what lies there.
            status = self._swap(operation, self._bad, digest=self._digests[self._new])
            assert not status.state.succeeded or self.live == self._new
        elif kind < 0.06:
            status = self._swap(operation, target, cancel=True)
        else:
            status = self._swap(operation, target, keep_previous=self._draw.random() < 0.5)
        assert status.state in {SwapState.SERVING, SwapState.ABORTED, SwapState.ROLLED_BACK}, status.error
        self.states[status.state] += 1
        if status.state.succeeded and status.target.digest in self._digests.values():
            self.live = next(f for f, digest in self._digests.items() if digest == status.target.digest)

    def _swap(
        self, operation: str, target: Path, *, digest: str = "", keep_previous: bool = True, cancel: bool = False
    ) -> SwapStatus:
        served = self._served
        fence = Fence(owner_uid="cli", revision=served.state().revision + 1)
        label = "1.0" if target == self._old else "1.1"
        request = SwapRequest(
            operation_id=operation,
            fence=fence,
            target=VersionRef(version=label, uri=target.as_uri(), digest=digest),
            loading=Loading(keep_previous=keep_previous),
        )
        served.control.post("/swaps", request, SwapStatus)
        if cancel:
            try:
                served.control.post(f"/swaps/{operation}/cancel", CancelRequest(fence=fence), SwapStatus)
            except ModelswapError as error:
                assert error.code == "Busy"  # noqa: PT017 - it was too late, which is an answer too
        return served.ended(operation)


@pytest.fixture
def serve(tmp_path: Path, versions: tuple[Path, Path, Path]) -> Iterator[Callable[[str], Served]]:
    started: list[Served] = []

    def make(fault: str) -> Served:
        served = Served(tmp_path / "served", versions[0], options=["--version", "1.0"], roots=[versions[0].parent])
        started.append(served)
        return served.start(fault=fault).wait_ready()

    yield make
    for served in started:
        served.stop()
        print(served.tail(lines=60))


def flat(samples: list[int], *, warm: int) -> float:
    """Return by what share the last samples exceed the first ones after the warm-up."""
    count = max(5, len(samples) // 20)
    first, last = samples[warm : warm + count], samples[-count:]
    return statistics.median(last) / statistics.median(first) - 1


@pytest.mark.parametrize("count", [pytest.param(1000, marks=pytest.mark.full), 24])
async def test_nobody_notices_and_nothing_grows(
    serve: Callable[[str], Served], versions: tuple[Path, Path, Path], count: int
) -> None:
    draw = random.Random(11)
    served = serve(faults(draw, count))
    worker = served.worker_pid()
    swaps = Swaps(served, versions, draw)
    front, resident = psutil.Process(served.pid), list[tuple[int, int]]()
    # The same prompts again and again: a tokenizer remembers ten thousand texts, and a stale prefix would show.
    async with load_on(
        served.data_url, streams=3, max_tokens=12, prompts=lambda number: QUESTIONS[number % 32]
    ) as load:
        await load.served_more(3)
        for _ in range(count):
            await asyncio.to_thread(swaps.one)
            resident.append((served.state().memory.rss_bytes, front.memory_info().rss))
            await load.served_more(1)
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0), summary.lines()
    assert all(honest(answer) for answer in load.answers)
    assert set().union(*map(makers, load.answers)) == {"1.0", "1.1"}
    assert live_hashes(served) == file_hashes(swaps.live)
    state = served.state()
    assert (state.restarts, served.worker_pid(), state.drifted, state.quarantined) == (0, worker, [], False)
    assert swaps.states[SwapState.SERVING] > count // 2
    assert swaps.states[SwapState.ABORTED] + swaps.states[SwapState.ROLLED_BACK] > 0
    if count >= 200:
        for samples in zip(*resident, strict=True):
            assert flat(list(samples), warm=50) < 0.02
        assert state.restart_advice == ""
