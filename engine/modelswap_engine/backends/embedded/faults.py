"""Test-only: lets a test break a worker at a named point, through the environment variable ``MODELSWAP_FAULT``.

``commit:raise``, ``stage:exit``, ``stage:delay=1.0``, ``release:flip=model.norm.weight`` (one bit of a live tensor
changes, as it does in damaged memory); several are separated by commas. Only the worker reads it. The
points are the control calls, plus ``midway`` (the first pointer of a commit has moved, the others have not). A fault
acts each time its point is passed; with ``#2`` behind it only the second time (``verify:raise#1``).
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

VARIABLE: Final = "MODELSWAP_FAULT"
EXIT_CODE: Final = 86


class FaultInjected(RuntimeError):
    """Raised where a test asked for it."""


class Faults:
    """The faults asked for.

    Args:
        text: the variable's value.

    Attributes:
        flip: changes one bit of a live tensor; set by whoever has one.

    Raises:
        ValueError: the text is not of the form above.
    """

    def __init__(self, text: str) -> None:
        self.flip: Callable[[str], None] = lambda _: None
        self._wanted: dict[str, list[tuple[str, int]]] = {}
        self._passed: Counter[str] = Counter()
        for item in filter(None, text.split(",")):
            point, colon, rest = item.strip().partition(":")
            action, _, number = rest.partition("#")
            if not colon or action.partition("=")[0] not in {"raise", "exit", "delay", "flip"}:
                raise ValueError(f"{VARIABLE}: {item!r} is not POINT:raise, :exit, :delay=SECONDS or :flip=TENSOR")
            self._wanted.setdefault(point, []).append((action, int(number or 0)))

    def hit(self, point: str) -> None:
        """Act on the faults of a point, if there are any.

        Raises:
            FaultInjected: a test asked for it.
        """
        self._passed[point] += 1
        for action, number in self._wanted.get(point, ()):
            if number not in {0, self._passed[point]}:
                continue
            if action == "exit":
                os._exit(EXIT_CODE)
            if action == "raise":
                raise FaultInjected(f"fault injected at {point}")
            name, _, value = action.partition("=")
            if name == "flip":
                self.flip(value)
            else:
                time.sleep(float(value))
