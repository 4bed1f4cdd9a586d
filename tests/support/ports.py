"""Both ports of a sidecar on loopback sockets, over the real coordinator, with an engine and sources in memory."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from modelswap_engine.http.app import control_app, data_app, listening
from modelswap_engine.http.auth import TokenFileAuthenticator
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.openai.routes import DataSettings
from modelswap_engine.http.resources import VersionResources
from modelswap_engine.http.spool import Spool
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.settings import SwapSettings
from tests.support.fake_adapters import FakeHost, FakeOpener
from tests.support.fake_source import FakeCheckpoint, FakeSources
from tests.support.scripted_backend import ScriptedBackend
from tests.support.swapping import Unbounded, request

MODEL = "tiny"
TOKEN = "a-token-for-tests"
POD = "pod-1"
CONTEXT = 64
MAX_REQUESTS = 8
_SPECIAL = "<|end|>"
_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}>"


def side_files(*, template: str | None = _TEMPLATE) -> dict[str, bytes]:
    """Return a byte-level tokenizer: one token for each byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_SPECIAL])
    config = {"architectures": ["Tiny"], "max_position_embeddings": CONTEXT, "eos_token_id": 0}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": _SPECIAL, "chat_template": template}).encode(),
        "config.json": json.dumps(config).encode(),
    }


def token_of(byte: int) -> int:
    """Return the id of a byte in the tokenizer above."""
    return _IDS[byte]


def _ids() -> list[int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept} | {byte: chr(256 + number) for number, byte in enumerate(moved)}
    return [1 + alphabet.index(letters[byte]) for byte in range(256)]


_IDS = _ids()


@dataclass
class Ports:
    """What a test talks to, and what it looks at."""

    coordinator: Coordinator
    backend: ScriptedBackend
    sources: FakeSources
    resources: VersionResources
    control: ClientSession
    data: ClientSession
    anonymous: ClientSession
    control_url: str
    data_url: str
    template: VersionRef
    tokens: Path
    host: FakeHost
    opener: FakeOpener
    desk: AdapterDesk
    control_routes: tuple[tuple[str, str], ...]  # method and path
    assigned: Assignment | None = None  # what the assignment file says when it is read again

    def publish(self, version: str, **tensors: bytes) -> VersionRef:
        """Put a version at a source."""
        content = FakeCheckpoint({"embed": b"e" * 8, "norm": b"n" * 2, **tensors}, side=side_files())
        uri = f"file:///models/{version}"
        self.sources.checkpoints[uri] = content
        return VersionRef(version=version, uri=uri, digest=content.digest)

    async def grow(self, *, replicas: bool = False) -> None:
        """Make the engine one of two ranks, both of which have proved what they hold."""
        self.backend._size, self.backend._replicas = 2, replicas
        self.coordinator.worker_lost()
        while not (self.coordinator._core.engine.healthy and self.coordinator.ready()):
            await asyncio.sleep(0.01)

    async def swap(self, target: VersionRef, operation: str, **options: object) -> SwapStatus:
        """Swap through the coordinator and return how it ended."""
        revision = self.coordinator.state().revision + 1
        order = request(target, operation, revision=revision, pod=POD, **options)  # type: ignore[arg-type]
        await self.coordinator.swap(order)
        return [status async for status in self.coordinator.watch(operation)][-1]


@contextlib.asynccontextmanager
async def open_ports(folder: Path, *, started: bool = True, max_queue: int = 4, **bounds: Any) -> AsyncIterator[Ports]:
    """Serve version 1.0 on both ports."""
    sources, resources, clock = FakeSources(), VersionResources(), SystemClock()
    backend = ScriptedBackend(read=sources.read, token_of=token_of)
    settings = SwapSettings(
        state_dir=folder / "state", pod_uid=POD, served_model_name=MODEL, propagation_seconds=0, probe_seconds=0.2,
        poll_seconds=0.05, memory_reserve=0, export_roots=(folder / "out",), **bounds,
    )  # fmt: skip
    host, opener = FakeHost(), FakeOpener()
    desk = AdapterDesk(
        host=host, opener=opener, clock=clock, settings=LoraSettings(slots=2, served_model_name=MODEL, pod_uid=POD)
    )
    coordinator = Coordinator(
        backend=backend,
        sources=sources,
        journal=Journal.open(folder / "state" / "journal", sync=lambda file: None),
        gate=Gate(clock=clock, max_queue=max_queue, queue_seconds=10),
        clock=clock,
        settings=settings,
        listeners=[resources],
        encode=resources.encode,
        companion=desk,
        memory=Unbounded(),  # type: ignore[arg-type]
        transfers=backend,
    )
    tokens = folder / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    metrics = Metrics(coordinator.state)
    control = control_app(
        coordinator=coordinator,
        authenticator=TokenFileAuthenticator(tokens),
        metrics=metrics,
        spool=Spool(folder / "state" / "bodies"),
        adapters=desk,
    )
    data = data_app(
        coordinator=coordinator,
        backend=backend,
        resources=resources,
        metrics=metrics,
        settings=DataSettings(served_model_name=MODEL, max_requests=MAX_REQUESTS),
        adapters=desk,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(coordinator.stop)
        urls = []
        for app, cancel in ((control, False), (data, True)):
            port = await stack.enter_async_context(listening(app, host="127.0.0.1", port=0, cancel_abandoned=cancel))
            urls.append(f"http://127.0.0.1:{port}")
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        ports = Ports(
            coordinator=coordinator,
            backend=backend,
            sources=sources,
            resources=resources,
            control=await stack.enter_async_context(ClientSession(urls[0], headers=bearer)),
            anonymous=await stack.enter_async_context(ClientSession(urls[0])),
            data=await stack.enter_async_context(ClientSession(urls[1])),
            control_url=urls[0],
            data_url=urls[1],
            template=VersionRef(),
            tokens=tokens,
            host=host,
            opener=opener,
            desk=desk,
            control_routes=tuple(
                (route.method, route.resource.canonical)
                for route in control.router.routes()
                if route.resource is not None and route.method != "HEAD"
            ),
        )
        ports.template = ports.publish("1.0")
        if started:
            await coordinator.start(ports.template, None, reread=lambda: ports.assigned)
            assert coordinator.ready(), coordinator.state().message
        yield ports
