"""What may be set about external engines; values only."""

from dataclasses import dataclass


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
