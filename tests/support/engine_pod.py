"""A pod's two containers as processes of one machine: `modelswap proxy`, and the launcher with a real engine.

:class:`Kubelet` does to them what a kubelet does to containers that ended or whose liveness probe fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from modelswap_engine.backends.external.handshake import read_boot
from tests.support import engines
from tests.support.cache import HACK, REPOSITORY
from tests.support.free_ports import free_port
from tests.support.launcher import Launcher, descendants
from tests.support.models import Pair
from tests.support.serve import Served
from tests.support.sglang import EXACT, with_our_half

ONE_PROCESS = ("--distributed-executor-backend", "uni")
PROBE_SECONDS = 0.2
OWN_OPTIONS = {
    "vllm": (
        "--model", "{model}", "--max-model-len", "512", "--enforce-eager", "--dtype", "float32",
        "--kv-cache-memory-bytes", str(64 << 20),
    ),
    "sglang": ("--model-path", "{model}", "--served-model-name", "tiny", *EXACT),
}  # fmt: skip


class Pod:
    """Both containers and their volumes.

    Args:
        folder: for the volumes.
        pair: it starts on the old version.
        engine: which one.
        options: of the engine.
        upstream: where the sidecar believes the engine to be; "" for where it is.
        variables: of the engine's container.
        route: options of the sidecar.
    """

    def __init__(
        self,
        folder: Path,
        pair: Pair,
        *,
        engine: str = "vllm",
        options: Sequence[str] = (),
        upstream: str = "",
        port: int = 0,
        variables: Mapping[str, str] | None = None,
        route: Sequence[str] = (),
    ) -> None:
        self.launcher = Launcher(folder)
        self.port = port or free_port()
        self.engine, self._options, self._variables = engine, options, dict(variables or {})
        if engine == "sglang":
            self._variables |= with_our_half(folder / "engine-files")
        checkpoints = folder / "checkpoints"
        upstream = upstream or f"http://127.0.0.1:{self.port}"
        command = ("proxy", "--backend", engine, "--upstream", upstream, "--version", "1.0", *route)
        volumes = ("--checkpoint-dir", str(checkpoints), "--runtime-dir", str(self.launcher.runtime))
        self.sidecar = Served(folder / "sidecar", pair.old, command=command, options=volumes, roots=[pair.new.parent])

    def start_engine(self) -> None:
        """Start the engine's container."""
        python = engines.environment(self.engine) / "bin" / "python"
        server = [str(python), str(HACK / "engines" / f"serve_{self.engine}.py"), *OWN_OPTIONS[self.engine]]
        self.launcher.start_with(
            [*server, *self._options],
            engine=self.engine,
            options=["--port", str(self.port)],
            python=[str(python)],
            variables=self._variables,
        )

    def start(self) -> Pod:
        """Start both, and wait until the pod is ready."""
        self.start_engine()
        self.sidecar.start().wait_ready(seconds=engines.START_SECONDS)
        return self

    def kill_engine(self) -> None:
        """End the engine's first process without a word; the launcher sees to the others."""
        (main,) = descendants(self.launcher.pid, depth=1)
        os.kill(main, signal.SIGKILL)

    def hook(self) -> subprocess.CompletedProcess[str]:
        """Run the preStop hook."""
        return subprocess.run(
            [
                sys.executable, "-S", "-m", "modelswap_engine.backends.drain", "--seconds=120",
                f"--control-port={self.sidecar.control_port}", f"--runtime-dir={self.launcher.runtime}",
            ],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "engine")}, text=True, capture_output=True, check=False,
        )  # fmt: skip

    def starts_on(self) -> str:
        """Return the digest that the running engine was started on."""
        boot = read_boot(self.launcher.runtime)
        assert boot is not None
        return boot.digest

    def boot_id(self) -> str:
        """Return the id of the engine's present start."""
        boot = read_boot(self.launcher.runtime)
        return boot.boot_id if boot is not None else ""

    def clear(self) -> None:
        """End everything."""
        self.launcher.clear()
        self.sidecar.stop()


class Kubelet:
    """Restarts the engine's container when it has ended, and ends it when its liveness probe fails.

    Attributes:
        restarts: how often it started the container again.
    """

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self.restarts = 0

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Kubelet]:
        """Watch until the context is left."""
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        pod, told = self._pod, False
        while True:
            if not pod.launcher.running:
                self.restarts += 1
                told = False
                await asyncio.to_thread(pod.start_engine)
            elif not told and await asyncio.to_thread(pod.sidecar.probe, "/engine-livez") == 503:
                told = True
                pod.launcher.signal()
            await asyncio.sleep(PROBE_SECONDS)  # its period
