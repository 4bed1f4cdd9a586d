"""What may be set about external engines; values only, and what follows from them for whoever waits."""

from dataclasses import dataclass

from modelswap_engine.backends.port import Bounds


@dataclass(frozen=True, kw_only=True)
class ExternalSettings:
    """Bounds, in seconds.

    Attributes:
        call: one short call, to the engine or to our half in it; it is heard between two steps, and one step of a large
            model with a long prompt can take a minute on a processor.
        load: proving or loading a whole version; ``stage`` staging one; ``hash`` hashing all live tensors.
        reach: how long a load waits for an engine that does not answer yet.
        rest: how long hashing what is live waits for a moment without requests, where the engine makes no step while it
            hashes.
        watch: how often the engine is asked whether it lives, and ``answer`` how long it may take to say so.
        forget: how long the engine may take to forget what it cached, once a commit is made: a request that nobody
            made, such as a question for its health, ends within milliseconds.
        prompts: all prompts of one swap, twice: before it, beside requests, and after the commit, while new ones wait.
        misses: how often in a row it may fail to say so before it counts as lost.
    """

    call: float = 120.0
    load: float = 1800.0
    stage: float = 1800.0
    hash: float = 1500.0
    reach: float = 60.0
    forget: float = 2.0
    prompts: float = 60.0
    rest: float = 5.0
    watch: float = 1.0
    answer: float = 5.0
    misses: int = 3

    @property
    def bounds(self) -> Bounds:
        """How long calls of the backend take at most; a step of a swap asks the engine a few short things in a row."""
        row = 4 * self.call + self.forget
        return Bounds(
            call=row + self.prompts,
            stage=self.stage + row,
            load=self.reach + 2 * self.load + 2 * row,  # what it holds is looked at, then all of it is loaded
            hash=self.rest + self.hash + row,
        )

    @property
    def plain_bounds(self) -> Bounds:
        """The same where the engine itself loads what it exchanges, and its checksums say what came of that."""
        found = self.bounds
        return Bounds(call=found.load + found.hash, stage=found.stage, load=found.load + found.hash, hash=found.hash)
