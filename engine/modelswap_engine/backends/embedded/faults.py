"""Test-only: lets a test break a worker at a named point, through the environment variable ``MODELSWAP_FAULT``.

``commit:raise``, ``stage:exit``, ``stage:delay=1.0``, ``release:flip=model.norm.weight`` (one bit of a live tensor
changes, as it does in damaged memory); several are separated by commas. Only the worker reads it. The
points are the control calls, plus ``midway`` (the first pointer of a commit has moved, the others have not) and
``token`` (a request's new tokens are about to be handed on: with a delay, answers last). A fault acts each time its
point is passed; with ``#2`` behind it only the second time (``verify:raise#1``), and with ``@1`` behind the point only
on that rank (``commit@1:kill``). ``stop`` hangs the whole process; ``lie`` has the call answer with a digest that is
not the one of the weights. ``file:PATH`` reads all this from a file, anew each time a point is passed; counting begins
again when its text is another.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

VARIABLE: Final = "MODELSWAP_FAULT"
EXIT_CODE: Final = 86
_FILE: Final = "file:"
_ACTIONS: Final = frozenset({"raise", "exit", "kill", "stop", "lie", "delay", "flip"})


class FaultInjected(RuntimeError):
    """Raised where a test asked for it."""


class Faults:
    """The faults asked for.

    Args:
        text: the variable's value.
        rank: this process's.

    Attributes:
        flip: changes one bit of a live tensor; set by whoever has one.

    Raises:
        ValueError: the text is not of the form above.
    """

    def __init__(self, text: str, *, rank: int = 0) -> None:
        self.flip: Callable[[str], None] = lambda _: None
        self._lies = False
        self._rank = rank
        self._file = Path(text.removeprefix(_FILE)) if text.startswith(_FILE) else None
        self._text = ""
        self._parse("" if self._file is not None else text)

    def _parse(self, text: str) -> None:
        self._text = text
        self._wanted: dict[str, list[tuple[str, int]]] = {}
        self._passed: Counter[str] = Counter()
        for item in filter(None, text.split(",")):
            point, colon, rest = item.strip().partition(":")
            action, _, number = rest.partition("#")
            if not colon or action.partition("=")[0] not in _ACTIONS:
                raise ValueError(f"{VARIABLE}: {item!r} is not POINT:ACTION with one of {', '.join(sorted(_ACTIONS))}")
            point, _, only = point.partition("@")
            if only in {"", str(self._rank)}:
                self._wanted.setdefault(point, []).append((action, int(number or 0)))

    def hit(self, point: str) -> None:
        """Act on the faults of a point, if there are any.

        Raises:
            FaultInjected: a test asked for it.
        """
        if self._file is not None and (text := self._file.read_text()) != self._text:
            self._parse(text)
        self._passed[point] += 1
        self._lies = False
        for action, number in self._wanted.get(point, ()):
            if number not in {0, self._passed[point]}:
                continue
            self._act(point, action)

    def _act(self, point: str, action: str) -> None:
        match action.partition("="):
            case ("exit", *_):
                os._exit(EXIT_CODE)
            case ("kill", *_):
                os.kill(os.getpid(), signal.SIGKILL)
            case ("stop", *_):
                os.kill(os.getpid(), signal.SIGSTOP)
            case ("lie", *_):
                self._lies = True
            case ("raise", *_):
                raise FaultInjected(f"fault injected at {point}")
            case ("flip", _, name):
                self.flip(name)
            case (_, _, seconds):
                time.sleep(float(seconds))

    def told(self, digest: str) -> str:
        """Return the digest that the call answers with."""
        return "sha256:a lie" if self._lies else digest
