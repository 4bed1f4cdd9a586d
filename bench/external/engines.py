"""The real engines, as the bench starts them, and the backends that lead into them. One small class for each engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import aiohttp

from bench.external.rows import IN_PROCESS, PLAIN
from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.control import EngineControl
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.port import Backend
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.plain import plain_sglang
from modelswap_engine.backends.sglang.pulse import Pulse
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.backends.vllm.plain import plain_vllm
from modelswap_engine.http.proxy.flights import Flights
from tests.support import engines
from tests.support.engines import EngineServer
from tests.support.free_ports import free_port
from tests.support.sglang import SMALL, Sglang, with_our_half


class BenchedEngine(Protocol):
    """One engine's server on a loopback port."""

    name: str
    url: str

    def start(self, model: Path) -> None:
        """Start it on a checkpoint and return when it is healthy."""

    def stop(self) -> None:
        """End it."""

    def control(self) -> EngineControl:
        """Return its control side; it is closed by whoever asked."""

    def backends(self) -> Mapping[str, Callable[[], Backend]]:
        """Return what makes a backend, not started, for each route into it."""


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

    def control(self) -> EngineControl:
        """Return its control side."""
        return self._control()

    def backends(self) -> Mapping[str, Callable[[], Backend]]:
        """Return what makes a backend, not started, for each route into it."""
        return {
            IN_PROCESS: lambda: ExternalBackend(self._control(), requests=Flights(), restart=RestartWish()),
            # vLLM on CPU packs linear layers, and shows nothing in their place.
            PLAIN: lambda: plain_vllm(
                self._control(),
                folder=self._folder / "plain",
                requests=Flights(),
                restart=RestartWish(),
                unverifiable=True,
            ),
        }

    def _control(self) -> VllmControl:
        return VllmControl(self.url, aiohttp.ClientSession())


class SglangServer:
    """SGLang with our half in its scheduler."""

    name = "sglang"

    def __init__(self, folder: Path) -> None:
        options = tuple(option for option in SMALL if option != "--disable-overlap-schedule")
        self._folder = folder
        self._server = Sglang(folder, options=options, variables=with_our_half(folder / "beside"))
        self.url = self._server.url

    def start(self, model: Path) -> None:
        """Start it on a checkpoint and return when it is healthy."""
        self._server.start(model).wait_ready()

    def stop(self) -> None:
        """End it."""
        self._server.kill()

    def control(self) -> EngineControl:
        """Return its control side."""
        client = SglangClient(self.url)
        return SglangControl(client, pulse=Pulse(client))  # as the sidecar has it

    def backends(self) -> Mapping[str, Callable[[], Backend]]:
        """Return what makes a backend, not started, for each route into it."""
        return {
            IN_PROCESS: lambda: ExternalBackend(self.control(), requests=Flights(), restart=RestartWish()),
            PLAIN: lambda: plain_sglang(
                SglangClient(self.url), folder=self._folder / "plain", requests=Flights(), restart=RestartWish()
            ),
        }


ENGINES: Mapping[str, Callable[[Path], BenchedEngine]] = {"vllm": Vllm, "sglang": SglangServer}
