"""What was committed to a running model and is not proven yet, and how it is undone.

It knows neither pauses nor replies: whoever commits or undoes something holds the pause that this needs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from modelswap_engine.backends.embedded.faults import Faults
from modelswap_engine.backends.embedded.model import LoadedModel
from modelswap_engine.backends.embedded.overlap import Overlap
from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.weights.version import Method


@dataclass(frozen=True, kw_only=True)
class Committed:
    """How a commit went: how tensors became live, the window in microseconds, running requests that it touched."""

    method: Method
    microseconds: float
    requests: int


class Commits:
    """The last commit, until it is proven.

    Args:
        faults: what a test asked to break.
        quiesce: waits until the device reads nothing that was given up.

    Attributes:
        unproven: True while what is live was committed and not proven.
    """

    def __init__(self, *, faults: Faults, quiesce: Callable[[], None]) -> None:
        self.unproven = False
        self._faults = faults
        self._quiesce = quiesce
        self._policy = RequestPolicy.NONE_RUNNING

    def commit(self, model: LoadedModel, operation_id: str, policy: RequestPolicy) -> Committed:
        """Move the pointers and let no old keys and values be found; the window holds nothing else."""
        model.generator.check(policy)
        self.unproven, self._policy = True, policy
        started = time.perf_counter_ns()
        method = model.updater.commit(operation_id)
        requests = model.generator.flush(policy)
        self._quiesce()
        return Committed(method=method, microseconds=(time.perf_counter_ns() - started) / 1000, requests=requests)

    def switch(self, model: LoadedModel, overlap: Overlap) -> None:
        """Make the second instance, which has the new weights, the main one."""
        self.unproven = True
        model.switch_overlap(overlap)

    def undo(self, model: LoadedModel, operation_id: str) -> int:
        """Put the old tensors back; return how many running requests that touched."""
        self._faults.hit("rollback")
        # Frozen requests made no step on the new weights: what they kept is what the old ones made, and right again.
        policy = RequestPolicy.FREEZE if self._policy is RequestPolicy.FREEZE else RequestPolicy.RECOMPUTE
        model.generator.check(policy)
        model.updater.rollback(operation_id)
        requests = model.generator.flush(policy)
        self._quiesce()
        self.unproven = False
        return requests

    def give_up(self, model: LoadedModel, overlap: Overlap) -> None:
        """End the second instance; the old one serves on."""
        self._faults.hit("rollback")
        model.undo_overlap(overlap)
        self.unproven = False
