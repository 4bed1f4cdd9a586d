"""The lines of a program that goes on running, as they come: what a person sees who leaves `kubectl get --watch` open.

Refuses to know what the lines mean.
"""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

_STOP_SECONDS = 10.0


class Lines:
    """Runs a program from entering the context until leaving it."""

    def __init__(self, program: Sequence[str], *, environment: Mapping[str, str]) -> None:
        self._program, self._environment = program, environment
        self._found: queue.Queue[str | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start the program."""
        self._process = subprocess.Popen(
            self._program, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="lines", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the program."""
        if self._process is None or self._reader is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def next(self, *, seconds: float) -> str:
        """Return the next line.

        Raises:
            TimeoutError: none came in so many seconds.
            EOFError: the program has ended.
        """
        try:
            line = self._found.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise TimeoutError(f"no line from {self._program[0]} in {seconds:.0f} s") from None
        if line is None:
            self._found.put(None)  # it stays ended
            raise EOFError(f"{self._program[0]} has ended")
        return line

    def _read(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is not None:
            with process.stdout as output:
                for line in output:
                    self._found.put(line.rstrip("\n"))
        self._found.put(None)
