"""Real engines on loopback ports for tests: made, started, waited for, stopped. No double of an engine is in here.

Each server has a process group and a short temporary folder of its own. Refuses to know what a test asks of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.cache import HACK, REPOSITORY
from tests.support.free_ports import free_port
from tests.support.leash import Leash, end, tree

START_SECONDS = 600.0  # the first start compiles some, perhaps beside other servers; a warm one takes ten
STOP_SECONDS = 20.0


def environment(engine: str) -> Path:
    """Return the engine's virtual environment, made if it is not there yet."""
    done = subprocess.run([str(HACK / "engines" / f"{engine}.sh")], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"hack/engines/{engine}.sh ended with status {done.returncode}; its output above says why")
    return Path(done.stdout.strip().splitlines()[-1])


class EngineServer:
    """One engine's own API server.

    Args:
        name: of the engine, for messages.
        command: starts it; the port is in there.
        port: where it listens.
        log: takes its output.
        variables: added to its environment.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, port: int, log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        # Unix sockets are made in there, and their paths are bounded.
        self._scratch = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))
        plain = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        ours = {"TMPDIR": str(self._scratch), "PYTHONPATH": str(REPOSITORY / "engine")}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                env={**plain, **ours, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._leash = Leash(self._process.pid)

    @property
    def pid(self) -> int:
        """Return the process id of the server; it leads its group."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return how the server ended; None while it runs."""
        return self._process.poll()

    def wait_healthy(self, *, seconds: float = START_SECONDS) -> None:
        """Return when it answers, or raise with the end of its log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with status {self.status}; the end of its log:\n{self.tail()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.1)  # a foreign program says it in no other way
        raise RuntimeError(f"{self.name} was not healthy within {seconds:g} s; the end of its log:\n{self.tail()}")

    def tail(self, *, lines: int = 40) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End all its processes, and remove what it left behind."""
        everybody = tree(self._process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        end(self._process.pid, known=everybody)
        self._process.wait()
        self._leash.let_go()
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextlib.contextmanager
def running(server: EngineServer) -> Iterator[EngineServer]:
    """Hold a server until the end of the block; its log is shown when it did not come up."""
    try:
        server.wait_healthy()
        yield server
    finally:
        server.stop()


def vllm(model: Path, folder: Path, *options: str, name: str = "tiny", port: int = 0) -> EngineServer:
    """Start vLLM on a checkpoint, with our half in its workers and its control routes; port 0 is any."""
    port = port or free_port()
    python = environment("vllm") / "bin" / "python"
    command = [
        str(python), str(HACK / "engines" / "serve_vllm.py"), "--model", str(model), "--served-model-name", name,
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--enforce-eager", "--dtype", "float32",
        "--kv-cache-memory-bytes", str(64 << 20), "--worker-extension-cls",
        "modelswap_engine.backends.vllm.extension.ModelswapExtension", *options,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    return EngineServer("vLLM", command, port=port, log=folder / "vllm.log")
