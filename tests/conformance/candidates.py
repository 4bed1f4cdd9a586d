"""What a backend gives to be put to the suite, and where those of this repository are.

A factory is a function without arguments that returns a :class:`Candidate`. It may start whatever engine it likes; the
suite knows the port, and besides it only what a client of the engine and somebody with access to its processes can do.
"""

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

from modelswap_engine.backends.port import Backend

OURS: Final = MappingProxyType(
    {
        "embedded": "tests.conformance.embedded:make",
        "vllm": "tests.conformance.vllm:make",
        "vllm-plain": "tests.conformance.vllm:make_plain",
        "sglang": "tests.conformance.sglang:make",
        "sglang-plain": "tests.conformance.sglang:make_plain",
    }
)
"""The backends of this repository, by the names that ``--backend`` takes."""


@dataclasses.dataclass(frozen=True)
class Versions:
    """Folders of three versions of one tiny Llama, with 264 tokens.

    ``old`` gives tokens below 132 only and ``new`` those above only, whatever the prompt; they differ in some tensors.
    ``full`` differs from ``old`` in all but the head. ``sides`` holds the side files, which they have in common.
    """

    old: Path
    new: Path
    full: Path
    sides: Path


class Subject(Protocol):
    """A backend over an engine that has come up, on ``Versions.old`` where somebody else starts it."""

    @property
    def backend(self) -> Backend:
        """The backend, started."""

    async def answer(self, text: str, *, tokens: int) -> list[int]:
        """Return the greedy answer to a text, so many tokens, as clients of the engine get it."""

    async def busy(self) -> bool:
        """Say whether the engine itself has a request to work on."""

    async def kill(self) -> None:
        """End the engine's processes without a word to anybody."""

    async def revive(self) -> None:
        """Start the engine again after it was killed, on ``Versions.old``; nothing where the backend does so itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A backend to be put to the suite.

    Attributes:
        begin: starts engine and backend; the folder is its own, and both end with the context.
        exceptions: promises that it does not keep, by the names of their tests without ``test_``, and why. Such a test
            must fail: an exception that is none any more is a failure.
        hidden: width of the model, which some engines want to be a multiple of something.
        dtype: of the checkpoints, so that the engine computes in it.
    """

    begin: Callable[[Versions, Path], AbstractAsyncContextManager[Subject]]
    exceptions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hidden: int = 128
    dtype: str = "float32"


def candidate(name: str) -> Candidate:
    """Return a candidate by its name, or by the import path of its factory (``package.module:function``)."""
    made = pkgutil.resolve_name(OURS.get(name, name))()
    if not isinstance(made, Candidate):
        raise TypeError(f"{name} gives {type(made).__name__}, and not a Candidate")
    return made
