"""Fetching from a real S3 server on loopback: speed beside obstore alone, what travels, how much memory it takes.

The server, what reads it raw, and what fetches share the machine's cores, so only ratios of one run mean something.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import obstore

from bench.raw import had_back
from bench.sharing import SharingResult, measure_sharing
from bench.verdicts import Verdict
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.objects import ObjectStores
from modelswap_engine.sources.remote.checkpoint import RemoteCheckpoint
from modelswap_engine.sources.remote.fetch import DEFAULT, Fetcher
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.sharing import NOBODY, Sharing
from modelswap_engine.sources.remote.source import RemoteSource
from modelswap_engine.sources.remote.spans import SPAN_BYTES, Wanted, plan_spans
from modelswap_engine.store.content import ContentStore
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.s3 import KEY, REGION, SECRET, S3Server

BUCKET: Final = "bench"
SIZES: Final = (0.25, 1.0)
SPEED: Final = 0.6
TRAVEL: Final = 1.02
GROWTH_BYTES: Final = 64 << 20
CHANGED: Final = 10
"""Every so many-th tensor is new in the second version."""
_WEIGHTS: Final = "model.safetensors"


class SourcesResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Figures of one run: bytes per second, bytes, ratios. ``peak_bytes`` is by size of the model, in bytes."""

    raw: float
    fetched: float
    travelled: int
    changed: int
    peak_bytes: dict[int, int]
    sharing: SharingResult

    @property
    def speed(self) -> float:
        """Of reading the same ranges by obstore alone."""
        return self.fetched / self.raw

    @property
    def travel(self) -> float:
        """Of what changed, what left the server."""
        return self.travelled / self.changed

    @property
    def growth(self) -> int:
        """How much more memory the largest model takes than the smallest."""
        return self.peak_bytes[max(self.peak_bytes)] - self.peak_bytes[min(self.peak_bytes)]

    def verdicts(self) -> list[Verdict]:
        """Hold the figures against what was asked."""
        return [
            Verdict(
                what="fetching from S3 on loopback, of reading by obstore alone",
                asked=f">= {100 * SPEED:.0f} %",
                measured=f"{100 * self.speed:.0f} % ({self.fetched / 1e9:.2f} of {self.raw / 1e9:.2f} GB/s)",
                met=self.speed >= SPEED,
            ),
            Verdict(
                what="bytes of tensors that left the server, by bytes that changed",
                asked=f"<= {TRAVEL}",
                measured=f"{self.travel:.3f} ({self.travelled / 1e6:.1f} of {self.changed / 1e6:.1f} MB)",
                met=self.travel <= TRAVEL,
            ),
            Verdict(
                what="memory of a fetch, of a model 4 × as large",
                asked="no more",
                measured=f"{self.growth / 1e6:+.0f} MB ("
                + ", ".join(f"{peak / 1e6:.0f} MB for {size / 1e9:.2f} GB" for size, peak in self.peak_bytes.items())
                + ")",
                met=self.growth <= GROWTH_BYTES,
            ),
            *self.sharing.verdicts(),
        ]


def measure_sources(*, turns: int, report: Callable[[str], None]) -> SourcesResult:
    """Measure with random models that are made for it."""
    with tempfile.TemporaryDirectory(prefix="modelswap-bench-") as folder, closing(S3Server(Path(folder))) as server:
        return _Measured(Path(folder), server, turns=turns, report=report).all()


class _Measured:
    def __init__(self, folder: Path, server: S3Server, *, turns: int, report: Callable[[str], None]) -> None:
        self._folder, self._server = folder, server
        self._turns, self._say = turns, report
        server.bucket(BUCKET)

    def all(self) -> SourcesResult:
        sizes = [int(size * 1e9) for size in SIZES]
        for size in sizes:
            self._say(f"uploading a model of {size / 1e9:g} GB")
            self._upload(size)
        raw, fetched = [], []
        for turn in range(self._turns):
            self._say(f"reading by obstore alone, and fetching: turn {turn + 1} of {self._turns}")
            # Memory that a virtual machine must ask its host for first costs more than all that is measured.
            had_back(sizes[-1] + sizes[-1] // 2)
            raw.append(asyncio.run(self._raw(sizes[-1])))
            had_back(sizes[-1] + sizes[-1] // 2)
            fetched.append(asyncio.run(self._fetch(sizes[-1])))
        self._say("what travels when every tenth tensor is new")
        travelled, changed = asyncio.run(self._travel(sizes[0]))
        sharing = asyncio.run(self._sharing(sizes[0]))
        self._say("memory, in a process of its own for each size")
        return SourcesResult(
            raw=statistics.median(raw),
            fetched=statistics.median(fetched),
            travelled=travelled,
            changed=changed,
            peak_bytes={size: self._peak(size) for size in sizes},
            sharing=sharing,
        )

    def _upload(self, size: int) -> None:
        model, store = self._folder / "model", self._server.store(BUCKET)
        write_random(model, nbytes=size)
        for file in model.iterdir():
            with file.open("rb") as stream:
                obstore.put(store, f"{size}/{file.name}", stream)
        obstore.put(store, f"{size}/{MANIFEST_FILE}", manifests.encode(build_manifest(model)))
        shutil.rmtree(model)

    async def _raw(self, size: int) -> float:
        """Read the ranges of all tensors as the fetch asks for them, and drop them."""
        manifest = build_manifest_of(self._server, size)
        wanted = [
            Wanted(key=str(n), place="", file=entry.file, offset=entry.offset, nbytes=entry.nbytes)
            for n, entry in enumerate(manifest.tensors)
        ]
        spans, store = iter(plan_spans(wanted, longest=SPAN_BYTES)), self._server.store(BUCKET)

        async def work() -> None:
            for span in spans:
                await obstore.get_range_async(store, f"{size}/{span.file}", start=span.start, end=span.stop)

        began = time.monotonic()
        await asyncio.gather(*(work() for _ in range(DEFAULT.parallel)))
        return manifest.total_bytes / (time.monotonic() - began)

    async def _fetch(self, size: int) -> float:
        pod = self._folder / "pod"
        shutil.rmtree(pod, ignore_errors=True)
        began = time.monotonic()
        resolved = await self._resolve(pod, f"s3://{BUCKET}/{size}", endpoint=self._server.url)
        brought = await resolved.obtain([entry.name for entry in resolved.manifest.tensors])
        seconds = time.monotonic() - began
        shutil.rmtree(pod, ignore_errors=True)
        return brought.source / seconds

    async def _travel(self, size: int) -> tuple[int, int]:
        pod, store = self._folder / "travel", self._server.store(BUCKET)
        file = bytearray(bytes(await (await obstore.get_async(store, f"{size}/{_WEIGHTS}")).bytes_async()))
        resolved = await self._resolve(pod, f"s3://{BUCKET}/{size}", endpoint=self._server.url)
        names = [entry.name for entry in resolved.manifest.tensors]
        await resolved.obtain(names)
        new = [resolved.manifest.by_name[name] for name in names[::CHANGED]]
        for entry in new:
            file[entry.offset] ^= 1
        folder = self._folder / "next"
        folder.mkdir()
        (folder / _WEIGHTS).write_bytes(file)
        await resolved.copy_side_files(folder / "side")
        for side in (folder / "side").iterdir():
            side.rename(folder / side.name)
        (folder / "side").rmdir()
        (folder / MANIFEST_FILE).write_bytes(manifests.encode(build_manifest(folder)))
        for made in folder.iterdir():
            obstore.put(store, f"next/{made.name}", made.read_bytes())
        with closing(FaultProxy(self._server.url)) as proxy:
            resolved = await self._resolve(pod, f"s3://{BUCKET}/next", endpoint=proxy.url)
            before = proxy.sent(_WEIGHTS)
            await resolved.obtain(names)
            return proxy.sent(_WEIGHTS) - before, sum(entry.nbytes for entry in new)

    async def _resolve(self, pod: Path, uri: str, *, endpoint: str) -> RemoteCheckpoint:
        return await source(pod, endpoint).resolve(uri)

    async def _sharing(self, size: int) -> SharingResult:
        folder = self._folder / "sharing"
        found = await measure_sharing(
            folder,
            uri=f"s3://{BUCKET}/{size}",
            server=self._server.url,
            make=lambda pod, endpoint, store, others: source(pod, endpoint, store=store, sharing=others),
            turns=self._turns,
            report=self._say,
        )
        shutil.rmtree(folder)
        return found

    def _peak(self, size: int) -> int:
        """Fetch in a process of its own; return what it took at most beyond what it had before."""
        pod = self._folder / "peak"
        command = [sys.executable, "-m", "bench.sources", str(pod), self._server.url, f"s3://{BUCKET}/{size}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        shutil.rmtree(pod, ignore_errors=True)
        return int(done.stdout)


def write_random(folder: Path, *, nbytes: int) -> None:
    """Write a checkpoint of random bytes, no two tensors alike: matrices of 2 to 24 MB and small vectors."""
    sizes = itertools.cycle((8 << 20, 2 << 20, 2 << 20, 8 << 20, 4096, 24 << 20, 24 << 20, 24 << 20, 4096))
    header: dict[str, Any] = {}
    at, left = 0, nbytes
    while left > 0:
        size = min(next(sizes), left)
        header[f"model.tensor_{len(header):05}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at, left = at + size, left - size
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    text, random = json.dumps(header).encode(), np.random.default_rng(nbytes)
    with (folder / _WEIGHTS).open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            stream.write(random.bytes(entry["shape"][0]))


def build_manifest_of(server: S3Server, size: int) -> Manifest:
    """Read the manifest that was uploaded."""
    data = obstore.get(server.store(BUCKET), f"{size}/{MANIFEST_FILE}").bytes()
    return manifests.decode(bytes(data))


def source(pod: Path, endpoint: str, *, store: ContentStore | None = None, sharing: Sharing = NOBODY) -> RemoteSource:
    """Return what a pod with an empty store, or this one, reads from."""
    keys: dict[str, Any] = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
    mounted = pod / "credentials" / "bench"
    mounted.mkdir(parents=True, exist_ok=True)
    for name, value in keys.items():
        (mounted / name).write_text(value)
    if store is None:
        store = ContentStore(pod / "store")
        store.open()
    return RemoteSource(
        ObjectStores(Credentials(mounted.parent)),
        allowed=Allowed([f"s3://{BUCKET}"], credentials=[("bench", f"s3://{BUCKET}")]),
        store=store,
        records=Records(pod / "records"),
        fetcher=Fetcher(store),
        sharing=sharing,
    )


async def _only_fetch(pod: Path, endpoint: str, uri: str) -> None:
    resolved = await source(pod, endpoint).resolve(uri)
    before = _peak_bytes()
    await resolved.obtain([entry.name for entry in resolved.manifest.tensors])
    print(_peak_bytes() - before)


def _peak_bytes() -> int:
    """Return the most memory that this process had; rusage would count what it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    asyncio.run(_only_fetch(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
