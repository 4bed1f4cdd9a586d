"""The launcher as a real process, in a Python that has the standard library alone, and a script in an engine's place.

The script stands for an engine only in tests of how a program is started and ended; it serves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelswap_engine.backends.external import handshake
from modelswap_engine.backends.external.handshake import Boot, Launch
from tests.support.cache import REPOSITORY
from tests.support.leash import Leash, end, tree

BARE_PYTHON = (sys.executable, "-S")  # no site-packages: as an engine's image, which has nothing of ours
LIMIT = 180.0

# What it does is its first argument; what it was given goes to the file that the environment names.
ENGINE = """
import json, os, signal, subprocess, sys, time
then = sys.argv[1]
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
children = []
if "ignore" in then:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "clean" in then:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if "child" in then:
    children.append(subprocess.Popen(sleeper).pid)
if "stray" in then:
    children.append(subprocess.Popen(sleeper, start_new_session=True).pid)
told = {"pid": os.getpid(), "arguments": sys.argv[2:], "environment": dict(os.environ), "children": children}
with open(os.environ["TOLD"] + ".draft", "w") as file:
    json.dump(told, file)
os.rename(os.environ["TOLD"] + ".draft", os.environ["TOLD"])
if "exit" in then:
    sys.exit(7)
if "killed" in then:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition gives something."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {LIMIT:g} s: {what}")


def alive(pid: int) -> bool:
    """Say whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int, *, depth: int = 100) -> list[int]:
    """Return the processes below one, down to a depth."""
    if depth == 0:
        return []
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (int(word) for word in (task / "children").read_text().split()):
            found += [child, *descendants(child, depth=depth - 1)]
    return found


class Launcher:
    """A launcher, the memory volume that it shares with a sidecar, and the script that it starts."""

    def __init__(self, folder: Path) -> None:
        """Make the folders."""
        self.runtime = folder / "run"
        self.runtime.mkdir()
        self.model = folder / "model"
        self.model.mkdir()
        self._told = folder / "told.json"
        self._script = folder / "engine.py"
        self._script.write_text(ENGINE)
        self._log = folder / "launcher.log"
        self._scratch = tempfile.mkdtemp(prefix="ms-", dir="/tmp")  # short: engines make sockets in there
        self._process: subprocess.Popen[bytes] | None = None
        self._leash: Leash | None = None

    def announce(self, digest: str = "sha256:abc") -> None:
        """Be the sidecar that has written a checkpoint."""
        handshake.announce(self.runtime, Launch(model=str(self.model), digest=digest))

    def start(self, then: str = "", *, engine: str = "vllm", options: Sequence[str] = ()) -> Launcher:
        """Start it with the script as its engine."""
        return self.start_with([sys.executable, "-S", str(self._script), then or "run", "{model}"], engine, options)

    def start_with(
        self,
        command: Sequence[str],
        engine: str = "vllm",
        options: Sequence[str] = (),
        *,
        python: Sequence[str] = BARE_PYTHON,
        variables: Mapping[str, str] | None = None,
    ) -> Launcher:
        """Start it with any command, in any Python."""
        given = ["--engine", engine, "--runtime-dir", str(self.runtime), *options, "--", *command]
        plain = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        ours = {"PYTHONPATH": str(REPOSITORY / "engine"), "TOLD": str(self._told), "TMPDIR": self._scratch}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*python, "-m", "modelswap_engine.backends.launch", *given],
                env={**plain, **ours, **(variables or {})}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._let_go()
        self._leash = Leash(self._process.pid)
        return self

    def _let_go(self) -> None:
        if self._leash is not None:
            self._leash.let_go()
            self._leash = None

    @property
    def log(self) -> str:
        """What it said."""
        return self._log.read_text()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until it has ended."""
        assert self._process is not None
        return self._process.poll() is None

    def boot(self) -> Boot:
        """Wait for a start, as the sidecar does."""
        boot: Boot = until(lambda: handshake.read_boot(self.runtime), "a start of the engine")
        return boot

    def told(self) -> dict[str, Any]:
        """Wait until the script runs, and return what it was given."""
        until(self._told.exists, f"the script runs; the launcher says:\n{self.log}")
        found: dict[str, Any] = json.loads(self._told.read_text())
        return found

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the launcher a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait_until_it_waits(self) -> None:
        """Wait until it has said that it waits for the sidecar."""
        until(lambda: "waiting for the sidecar" in self.log, "the launcher waits for the sidecar")

    def wait_until_it_took_the_signal(self) -> None:
        """Wait until a signal that was sent is no longer pending."""
        until(lambda: not self._pending(signal.SIGTERM), "the launcher took the signal")

    def _pending(self, number: signal.Signals) -> bool:
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        mask = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
        return bool(int(mask, 16) & 1 << (number - 1))

    def ended(self) -> int:
        """Wait for its end and return its exit code."""
        assert self._process is not None
        return self._process.wait(LIMIT)

    def clear(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            everybody = tree(self._process.pid)
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            end(self._process.pid, known=everybody)
            self._process.wait()
        self._let_go()
        shutil.rmtree(self._scratch, ignore_errors=True)
