"""A serving process as users start it: `modelswap serve` or `proxy` on free ports, watched, asked and ended by pid.

Refuses to know what is inside; everything goes through the two ports and the command line.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from modelswap_engine.cli.client import ControlClient
from modelswap_engine.protocol.codec import encode
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import Fence, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.policy import Checks, Loading, Traffic, TrafficMode, VerifyMode
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.version import CONTROL_PREFIX
from tests.support.free_ports import free_port
from tests.support.pacing import slowly, variables

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--kv-blocks", "256", "--page-size", "16", "--max-batch-tokens", "256")
POLL_SECONDS = 0.05
STRICT = "tests.support.strict"


def environment(**more: str) -> dict[str, str]:
    """Return the environment in which our packages are found and torch keeps to one thread."""
    path = os.pathsep.join([str(ROOT / "engine"), str(ROOT / "operator"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


@dataclass
class Finished:
    """What a command of the command line left behind."""

    code: int
    out: str
    err: str


class Served:
    """One engine process; may be killed and started again with the same state directory and ports.

    A call of ours that blocks its event loop ends it (:mod:`tests.support.strict`), unless another ``module`` is run.
    """

    def __init__(
        self,
        folder: Path,
        model: Path | str,
        *,
        command: Sequence[str] = ("serve", *SMALL),
        options: Sequence[str] = (),
        roots: Sequence[Path] = (),
        module: str = STRICT,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.control_port = free_port(), free_port()
        self.token_file = folder / "token"
        if not self.token_file.exists():
            self.token_file.write_text(secrets.token_urlsafe(24) + "\n")
        self.log = folder / "serve.log"
        self._faults = folder / "faults"
        self._options = [
            *("-m", module),
            *command,
            *("--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--control-port", str(self.control_port)),
            *("--state-dir", str(folder / "state"), "--token-file", str(self.token_file)),
            *(item for root in roots for item in ("--allow-root", str(root))),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def data_url(self) -> str:
        """The data port."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def control_url(self) -> str:
        """The control port."""
        return f"http://127.0.0.1:{self.control_port}"

    @property
    def control(self) -> ControlClient:
        """A client of the control port with the token."""
        return ControlClient(self.control_url, token=self.token_file.read_text().strip())

    @property
    def pid(self) -> int:
        """The process id of the front."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, fault: str = "") -> "Served":
        """Start the process; :meth:`wait_ready` says when it serves. With a ``fault`` there is no :meth:`slowly`."""
        broken = {"MODELSWAP_FAULT": fault} if fault else variables(self._faults)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._options],
                env=environment(**broken),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def slowly(self) -> AbstractContextManager[None]:
        """Have the embedded engine answer slowly while the context lasts; see :mod:`tests.support.pacing`."""
        return slowly(self._faults)

    def wait_ready(self, *, seconds: float = 240.0) -> "Served":
        """Return when `/readyz` says so; what ended the process instead is in the error."""
        deadline = time.monotonic() + seconds
        while not self.ready():
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"it ended with {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not ready after {seconds:.0f} s:\n{self.tail()}")
            time.sleep(POLL_SECONDS)
        return self

    def ready(self) -> bool:
        """Ask `/readyz` once."""
        return self.probe("/readyz") == 200

    def probe(self, path: str) -> int:
        """Return the status of an open route, 0 when nobody answers."""
        try:
            with urllib.request.urlopen(self.control_url + path, timeout=10) as response:
                status: int = response.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def state(self) -> EngineState:
        """Read the state."""
        return self.control.get("/state", EngineState)

    def tell(self, path: str, message: object) -> None:
        """Call a control route that has nothing to answer; a refusal is raised."""
        request = urllib.request.Request(
            f"{self.control_url}{CONTROL_PREFIX}{path}",
            data=encode(message),
            headers={"Authorization": f"Bearer {self.token_file.read_text().strip()}"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.status == 204

    def worker_pid(self) -> int:
        """Return the process id of the first rank."""
        return self.state().ranks[0].pid

    def told(self) -> dict[str, str]:
        """Return the variables from which the command line knows whom to ask."""
        return {"MODELSWAP_URL": self.control_url, "MODELSWAP_TOKEN_FILE": str(self.token_file), "COLUMNS": "200"}

    def command(self, *arguments: str, seconds: float = 300.0) -> Finished:
        """Run a command of the command line against this process."""
        done = subprocess.run(
            [sys.executable, "-m", "modelswap_engine", *arguments],
            env=environment(**self.told()),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def begin(
        self,
        target: Path,
        version: str,
        *,
        operation: str,
        mode: TrafficMode = TrafficMode.DRAIN,
        traffic: Traffic | None = None,
        verify: VerifyMode = VerifyMode.STANDARD,
        checks: Checks | None = None,
    ) -> SwapStatus:
        """Start a swap as a person would, and return as soon as it is accepted."""
        request = SwapRequest(
            operation_id=operation,
            fence=Fence(owner_uid="cli", revision=self.state().revision + 1),
            target=VersionRef(version=version, uri=target.as_uri()),
            traffic=traffic or Traffic(mode=mode),
            loading=Loading(verify=verify),
            checks=checks or Checks(),
        )
        return self.control.post("/swaps", request, SwapStatus)

    def reached(self, operation: str, state: SwapState) -> SwapStatus:
        """Return an operation's status once it is in this state, or has ended without."""
        statuses = self.control.events(operation, after=0)
        return next(status for status in statuses if status.state is state or status.state.terminal)

    def ended(self, operation: str) -> SwapStatus:
        """Return how an operation ended, once it has."""
        return list(self.control.events(operation, after=0))[-1]

    def terminate(self) -> None:
        """Ask it to end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait(self, *, seconds: float = 60.0) -> int:
        """Return its exit status once it has ended."""
        assert self._process is not None
        return self._process.wait(seconds)

    def kill(self) -> None:
        """End the front without asking."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it, whatever state it is in."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self, *, lines: int = 40) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
