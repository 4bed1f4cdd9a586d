"""Child processes that end with the test run: started with their output in a file, stopped by their own pid.

Refuses to know what runs in them.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


class Child:
    """One program: its log says why it ended, and it does not outlive the process that started it."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path) -> None:
        """Start `command` with its output appended to `log`."""
        self.name = name
        self.log = log
        guard = shutil.which("setpriv")  # takes the child along when this process is killed
        prefix = [guard, "--pdeathsig", "KILL"] if guard else []
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*prefix, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return how the program ended; None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise, with the end of its log, if the program is not running any more."""
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"{self.name} ended with status {status}; the end of {self.log}:\n{self.tail()}")

    def tail(self, *, lines: int = 15) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, *, seconds: float = 10.0) -> None:
        """Ask it to end, and make it end after `seconds`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End it without asking."""
        self._process.kill()
        self._process.wait()
