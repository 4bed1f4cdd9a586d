"""The real engines, as the bench starts them, and the backends that lead into them. One small class for each engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import aiohttp

from bench.external.rows import IN_PROCESS
from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.control import EngineControl
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.port import Backend
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.http.proxy.flights import Flights
from tests.support import engines
from tests.support.engines import EngineServer
from tests.support.free_ports import free_port


class BenchedEngine(Protocol):
    """One engine's server on a loopback port."""

    name: str
    url: str

    def start(self, model: Path) -> None:
        """Start it on a checkpoint and return when it is healthy."""

    def stop(self) -> None:
        """End it."""

    def control(self, session: aiohttp.ClientSession) -> EngineControl:
        """Return its control side."""

    def backends(self) -> Mapping[str, Backend]:
        """Return a new backend for each route into it; none is started."""


class Vllm:
    """vLLM with our half in its worker, in one process."""

    name = "vllm"

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._server: EngineServer | None = None

    def start(self, model: Path) -> None:
        """Start it on a checkpoint and return when it is healthy."""
        options = (
            *("--distributed-executor-backend", "uni", "--dtype", "bfloat16"),
            *("--max-model-len", "256", "--kv-cache-memory-bytes", str(128 << 20)),
        )
        self._server = engines.vllm(model, self._folder, *options, port=self._port)
        self._server.wait_healthy()

    def stop(self) -> None:
        """End it."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def control(self, session: aiohttp.ClientSession) -> EngineControl:
        """Return its control side."""
        return VllmControl(self.url, session)

    def backends(self) -> Mapping[str, Backend]:
        """Return a new backend for each route into it; none is started."""
        control = self.control(aiohttp.ClientSession())
        return {IN_PROCESS: ExternalBackend(control, requests=Flights(), restart=RestartWish())}


ENGINES = {"vllm": Vllm}
