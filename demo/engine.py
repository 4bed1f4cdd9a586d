"""One engine process on this machine, and the `modelswap` command against it.

Refuses to know which versions there are: it starts, shows, runs, stops.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from demo.console import command, step
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.engine_state import EngineState
from tests.support.free_ports import free_port

_START_SECONDS = 300.0
_STOP_SECONDS = 30.0


class CommandFailed(RuntimeError):
    """A command did not end as it should have; its output was shown."""


class Engine:
    """`modelswap serve` in a child process, from entering the context until leaving it.

    Args:
        model: folder of the version it starts with.
        version: its label.
        name: served model name.
        roots: folders that other versions may come from.
        home: folder for the token, the journal and the log.
        options: further options of `modelswap serve`.
    """

    def __init__(
        self,
        model: Path,
        *,
        version: str,
        name: str,
        roots: Sequence[Path],
        home: Path,
        options: Sequence[str] = (),
    ) -> None:
        data_port, control_port = free_port(), free_port()
        self.data_url = f"http://127.0.0.1:{data_port}"
        self.control_url = f"http://127.0.0.1:{control_port}"
        self.log = home / "engine.log"
        self.token_file = home / "token"
        self._arguments = [
            "serve", f"--model={model}", f"--version={version}", f"--served-model-name={name}",
            "--host=127.0.0.1", f"--port={data_port}", f"--control-port={control_port}",
            f"--token-file={self.token_file}", f"--state-dir={home / 'state'}",
            *(f"--allow-root={root}" for root in roots), *options,
        ]  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        """Write the token, start the process and wait until it serves."""
        self.token_file.parent.mkdir(parents=True, exist_ok=True)
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(secrets.token_urlsafe(32) + "\n")
        command(["modelswap", *self._arguments])
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *_modelswap(self._arguments), stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
            )
        try:
            with step("starting it and loading the model"):
                await self._serving(self._process)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask the process to drain and end."""
        await self._stop()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid if self._process is not None else 0

    async def state(self) -> EngineState:
        """Return what the control port says."""
        token = self.token_file.read_text().strip()
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=30) as client:
            answer = await client.get(f"{self.control_url}/modelswap/v1/state")
        return decode(answer.content, EngineState)

    async def run(self, *arguments: str, expect: int = 0) -> None:
        """Show and run a `modelswap` command against this engine, with its output on ours.

        Raises:
            CommandFailed: the exit status is not the expected one.
        """
        command(["modelswap", *arguments])
        environment = {
            **os.environ,
            "MODELSWAP_URL": self.control_url,
            "MODELSWAP_TOKEN_FILE": str(self.token_file),
        }
        process = await asyncio.create_subprocess_exec(*_modelswap(arguments), env=environment)
        status = await process.wait()
        if status != expect:
            raise CommandFailed(f"modelswap {arguments[0]} ended with status {status}, not {expect}")

    async def _serving(self, process: asyncio.subprocess.Process) -> None:
        async with asyncio.timeout(_START_SECONDS), httpx2.AsyncClient() as client:
            while True:
                if process.returncode is not None:
                    end = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
                    raise CommandFailed(f"modelswap serve ended with status {process.returncode}:\n{end}")
                try:
                    if (await client.get(f"{self.control_url}/readyz")).status_code == 200:
                        return
                except httpx2.TransportError:
                    pass  # not listening yet
                await asyncio.sleep(0.2)

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _modelswap(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "modelswap_engine", *arguments]
