"""Weight loaders as the operator of an engine would bring them; imported by the worker, never by a request."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

RENAMED: Final = "tests.support.custom_loaders:renamed"
BROKEN: Final = "tests.support.custom_loaders:broken"
MISSING: Final = "tests.support.custom_loaders:missing"


def renamed(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """A trainer with a prefix of its own, in double precision."""
    for name, tensor in named:
        yield name.removeprefix("trainer."), tensor.float()


def broken(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """One with a defect."""
    for name, tensor in named:
        yield name, tensor / "two"
