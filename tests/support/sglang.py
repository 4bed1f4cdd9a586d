"""A real SGLang server, and the questions that tests ask of it."""

import json
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from typer.testing import CliRunner

from modelswap_engine.cli.main import app
from tests.support.adapters import LINEAR
from tests.support.cache import HACK
from tests.support.engines import EngineServer, environment
from tests.support.free_ports import free_port
from tests.support.held import Under, held

HELD_TOKENS = 150
PUBLISHED = 40  # tokens of an answer: by then its schedulers have told the number of requests with this one in it
SMALL = (
    "--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--context-length", "512", "--max-total-tokens", "8192",
    "--mem-fraction-static", "0.3", "--skip-server-warmup", "--sleep-on-idle", "--disable-overlap-schedule",
)  # fmt: skip

EXACT = tuple(
    "float32" if option == "bfloat16" else option for option in SMALL if option != "--disable-overlap-schedule"
)
"""With the schedule that SGLang has by itself, and in numbers in which the size of a batch decides no token."""

LORA = (
    "--enable-lora", "--max-lora-rank", "8", "--max-loras-per-batch", "2", "--max-loaded-loras", "4",
    "--lora-backend", "torch_native", "--lora-target-modules", *LINEAR,
)  # fmt: skip


def with_our_half(folder: Path) -> dict[str, str]:
    """Return the environment in which SGLang finds our half, as in a pod."""
    done = CliRunner().invoke(app, ["engine-files", str(folder)])
    assert done.exit_code == 0, done.output
    return {"PYTHONPATH": str(folder)}


class Sglang:
    """One server; may be killed and started again, also on another model, at the same address."""

    def __init__(
        self, folder: Path, *, options: Sequence[str] = SMALL, variables: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "sglang.log"
        self._options = options
        self._variables = variables or {}
        self._server: EngineServer | None = None

    def start(self, model: Path) -> "Sglang":
        """Start it on a model; :meth:`wait_ready` says when it serves."""
        python = str(environment("sglang") / "bin/python")
        command = [
            python, str(HACK / "engines/serve_sglang.py"), "--model-path", str(model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port), *self._options,
        ]  # fmt: skip
        self._server = EngineServer("SGLang", command, port=self.port, log=self._log, variables=self._variables)
        return self

    def wait_ready(self) -> "Sglang":
        """Return when it takes requests; what ended it instead is in the error."""
        assert self._server is not None
        self._server.wait_healthy()
        return self

    @property
    def running(self) -> bool:
        """True while its first process lives."""
        return self._server is not None and self._server.status is None

    def kill(self) -> None:
        """End all its processes at once."""
        if self._server is not None:
            if self.running:
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.stop()
            self._server = None


async def ids(url: str, prompt: Sequence[int], *, adapter: str = "", tokens: int) -> list[int]:
    """Return the greedy answer to tokens as tokens, from an adapter or the base, through whatever is at the address."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, **({"lora_path": adapter} if adapter else {})}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return list((await answer.json())["output_ids"])


class Asked:
    """An answer to a prompt: its tokens, and what SGLang says about it."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.tokens: list[int] = answer["output_ids"]
        self.meta: dict[str, Any] = answer["meta_info"]

    @property
    def finish(self) -> str:
        """Why it ended."""
        return str(self.meta["finish_reason"]["type"])

    @property
    def versions(self) -> list[str]:
        """The labels of the weights that made it, in order."""
        return [span["version"] for span in self.meta.get("weight_versions") or []]


class Client:
    """What a client asks, straight at the server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, text: str, *, tokens: int = 16) -> Asked:
        """Return the greedy answer to the bytes of a text."""
        prompt = [8 + byte % 200 for byte in text.encode()]
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return Asked(await self.post("/generate", {"input_ids": prompt, "sampling_params": sampling}))

    async def stream(self, text: str, *, tokens: int) -> AsyncGenerator[Asked, None]:
        """Yield the greedy answer to the bytes of a text, each time all of it so far."""
        prompt = [8 + byte % 200 for byte in text.encode()]
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            async for line in response.content:
                data = line.decode().removeprefix("data: ").strip()
                if data.startswith("{"):
                    yield Asked(json.loads(data))

    def held(self, text: str, *, tokens: int = HELD_TOKENS) -> AbstractAsyncContextManager[Under[Asked]]:
        """Have the server stand still in the middle of an answer; see :func:`tests.support.held.held`."""
        return held(self, lambda: self.stream(text, tokens=tokens), after=PUBLISHED)

    async def stop_inside(self) -> bool:
        """Stop it between two steps; say whether a request is in it, which then stays there.

        The pause is not acknowledged, but its schedulers do what they are told in order: an attempt to flush comes
        after it, and fails where a request holds some of the cache.
        """
        assert (await self.post("/pause_generation", {"mode": "in_place"}))["status"] == "ok"
        async with self._session.post(f"{self._url}/flush_cache") as response:
            return response.status == 400 and await self.running() > 0

    async def go_on(self) -> None:
        """Let it make steps again; one that does, goes on doing so."""
        assert (await self.post("/continue_generation", {}))["status"] == "ok"

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Call a route, whatever it answers."""
        async with self._session.post(self._url + path, json=body) as response:
            return await response.json(content_type=None)

    async def get(self, path: str) -> Any:
        """Read a route."""
        async with self._session.get(self._url + path) as response:
            return await response.json(content_type=None)

    async def running(self) -> int:
        """Return how many requests are in the server."""
        loads = (await self.get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def checksum(self) -> str:
        """Return what all live tensors hash to."""
        return str((await self.post("/weights_checker", {"action": "checksum"}))["per_engine_checksum"])


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """A client, closed when it is left."""
    client = Client(url)
    try:
        yield client
    finally:
        await client.close()
