"""Two instances of a model side by side: the old one ends what it began, the new one has the weights of a swap.

Both share the memory of every tensor that the swap leaves as it is. The weights core keeps the module that it was made
for, which is always the newest one: the old instance moves to a copy of it before the first pointer changes. So what is
live, what is retained and what a rollback does are the same as after any other swap. Knows no request and no client;
who uses which instance is decided outside.
"""

from collections.abc import Callable

from transformers import PreTrainedModel

from modelswap_engine.backends.embedded.faults import Faults
from modelswap_engine.backends.embedded.generator import Generator
from modelswap_engine.weights.updater import WeightUpdater


class Overlap:
    """The time in which there are two instances, from :meth:`open` to :meth:`close` or :meth:`undo`.

    Args:
        operation_id: whose it is.
        model: what the weights core changes; ``running`` runs on it.
        updater: has the operation prepared.
        running: the instance that serves.
        make: makes a generator for the module, with a KV cache of its own.
        copied: makes a copy of the module over the same tensors.
        faults: what a test asked to break.

    Attributes:
        digest: the version of the old instance.
        still_seconds: how long the old instance stood still to move to its copy.
        switched: True once the new instance is the main one.
    """

    def __init__(
        self,
        operation_id: str,
        *,
        model: PreTrainedModel,
        updater: WeightUpdater,
        running: Generator,
        make: Callable[[], Generator],
        copied: Callable[[], PreTrainedModel],
        faults: Faults,
    ) -> None:
        self.operation_id = operation_id
        self.digest = updater.digest
        self.still_seconds = 0.0
        self.switched = False
        self.old = running
        self.new: Generator | None = None
        self._model = model
        self._updater = updater
        self._make = make
        self._copied = copied
        self._faults = faults

    def open(self) -> None:
        """Bring the new instance up and run a first request through it, while the old one serves.

        Raises:
            ModelswapError: it cannot run; everything is as before.
        """
        digest = self.digest
        self.still_seconds = self.old.move(self._copied(), digest=lambda: digest)
        try:
            self._updater.commit(self.operation_id)
            self._faults.hit("overlap")
            self.new = self._make()
            self.new.start()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Give the new instance up; the old one serves on, on the module and with the weights that it had."""
        if self.new is not None:
            self.new.stop("the swap was taken back")
            self.new = None
        self._updater.rollback(self.operation_id)
        updater = self._updater
        self.old.move(self._model, digest=lambda: updater.digest)

    def close(self) -> int:
        """End the old instance and free its KV cache; return how many requests were still on it, which get an error."""
        self._faults.hit("retire")
        return self.old.stop("the instance of the version before was given up")
