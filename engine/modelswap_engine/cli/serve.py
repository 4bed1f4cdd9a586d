"""The engine process: wires backend, sources, coordinator and the two ports, and ends in good order.

Both ports are bound before the model is loaded, so that a wrong port is an error at once and probes get answers
while it loads. SIGTERM: not ready → clients move away → drain → exit; a second signal ends at once.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from modelswap_engine import __version__
from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import CommitMethod, Device, EmbeddedSettings
from modelswap_engine.cli.allocator import few_heaps
from modelswap_engine.cli.logs import configure
from modelswap_engine.cli.serving import Auth, Logs
from modelswap_engine.http.app import control_app, data_app, listening
from modelswap_engine.http.auth import Authenticator, InsecureAuthenticator, TokenFileAuthenticator
from modelswap_engine.http.cluster import cluster_authenticator
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.openai.routes import DataSettings
from modelswap_engine.http.resources import VersionResources
from modelswap_engine.http.spool import Spool
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import MIB, LoraSettings
from modelswap_engine.protocol.assignment import ASSIGNMENT_KEY, Assignment
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.errors import BadRequest, Internal, ModelswapError, NotReady
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.registry import Sources
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.growth import GrowthLimits
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.settings import SwapSettings

PROBE_SECONDS = 15.0

_log = structlog.get_logger("modelswap.serve")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The options of ``modelswap serve``, see there."""

    model: Path
    served_model_name: str
    version: str
    host: str
    port: int
    control_port: int
    state_dir: Path
    allow_root: tuple[Path, ...]
    assignment_dir: Path | None
    auth: Auth | None
    token_file: Path | None
    allowed_subject: tuple[str, ...]
    insecure: bool
    pod_uid: str
    max_batch_tokens: int
    kv_blocks: int
    page_size: int
    device: Device
    tensor_parallel: int
    data_parallel: int
    lora_slots: int
    lora_max_rank: int
    lora_host_mib: int
    lora_slot_mib: int
    lora_max_pinned: int | None
    max_queue: int
    reclaim_seconds: float
    weight_loader: tuple[str, ...]
    weight_peer: tuple[str, ...]
    export_root: tuple[Path, ...]
    drain_seconds: float
    propagation_seconds: float
    previous_seconds: float
    previous_bytes: int
    audit_seconds: float
    audit_bytes_per_second: int
    repair_attempts: int
    restart_after_swaps: int
    commit_method: CommitMethod
    debug_checks: bool
    logs: Logs


def run(settings: ServeSettings) -> None:
    """Serve until a signal.

    Raises:
        ModelswapError: it could not start.
    """
    few_heaps()
    configure(json=settings.logs is Logs.JSON or (settings.logs is Logs.AUTO and not sys.stderr.isatty()))
    try:
        asyncio.run(_serve(settings))
    except ModelswapError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: a person gets one line, the log the rest
        _log.error("unexpected error", exc_info=error)
        raise Internal(f"the engine ended by a defect: {type(error).__name__}", advice="report the log above") from None


async def _serve(settings: ServeSettings) -> None:
    model = settings.model.resolve()
    if not model.is_dir():
        raise BadRequest(f"--model {settings.model}: no such folder", advice="pass the folder of a checkpoint")
    stopping = _signals()
    served_name = settings.served_model_name or model.name
    authenticator = await _authenticator(settings)
    backend = EmbeddedBackend(_engine(settings))
    resources = VersionResources()
    clock, sources = SystemClock(), _sources(settings, model=model)
    adapters = AdapterDesk(host=backend, opener=sources, clock=clock, settings=_lora(settings, served_name=served_name))
    coordinator = _coordinator(
        settings,
        backend=backend,
        sources=sources,
        clock=clock,
        resources=resources,
        adapters=adapters,
        served_name=served_name,
    )
    metrics = Metrics(coordinator.state)
    control = control_app(
        coordinator=coordinator,
        authenticator=authenticator,
        metrics=metrics,
        spool=Spool(settings.state_dir.resolve() / "bodies"),
        adapters=adapters,
    )
    data = data_app(
        coordinator=coordinator,
        backend=backend,
        resources=resources,
        metrics=metrics,
        settings=DataSettings(served_model_name=served_name, context_limit=settings.kv_blocks * settings.page_size),
        adapters=adapters,
    )
    async with (
        listening(control, host=settings.host, port=settings.control_port, cancel_abandoned=False),
        listening(data, host=settings.host, port=settings.port, cancel_abandoned=True),
    ):
        _log.info("listening", host=settings.host, port=settings.port, control_port=settings.control_port)
        template = VersionRef(version=settings.version or model.name, uri=model.as_uri())
        try:
            if await _unless_stopped(stopping, _start(coordinator, template, settings)):
                await stopping.wait()
                await _drain(coordinator, settings)
        finally:
            await coordinator.stop()


def _sources(settings: ServeSettings, *, model: Path) -> Sources:
    roots = [model, *(root.resolve() for root in settings.allow_root)]
    return Sources({"file": FileSource(roots=roots, cache=settings.state_dir.resolve() / "manifests")})


def _engine(settings: ServeSettings) -> EmbeddedSettings:
    try:
        return EmbeddedSettings(
            page_size=settings.page_size,
            num_blocks=settings.kv_blocks,
            max_batch_tokens=settings.max_batch_tokens,
            tensor_parallel=settings.tensor_parallel,
            data_parallel=settings.data_parallel,
            weight_loaders=settings.weight_loader,
            commit_method=settings.commit_method,
            device=settings.device,
            lora_slots=settings.lora_slots,
            lora_max_rank=settings.lora_max_rank,
        )
    except ValueError as error:
        raise BadRequest(str(error), advice="see modelswap serve --help") from None


def _lora(settings: ServeSettings, *, served_name: str) -> LoraSettings:
    return LoraSettings(
        slots=settings.lora_slots,
        host_bytes=settings.lora_host_mib * MIB,
        slot_bytes=settings.lora_slot_mib * MIB,
        max_pinned=settings.lora_max_pinned,
        served_model_name=served_name,
        pod_uid=settings.pod_uid,
    )


def _coordinator(
    settings: ServeSettings,
    *,
    backend: EmbeddedBackend,
    sources: Sources,
    clock: SystemClock,
    resources: VersionResources,
    adapters: AdapterDesk,
    served_name: str,
) -> Coordinator:
    state_dir = settings.state_dir.resolve()
    return Coordinator(
        backend=backend,
        sources=sources,
        journal=Journal.open(state_dir / "journal"),
        gate=Gate(clock=clock, max_queue=settings.max_queue),
        clock=clock,
        settings=SwapSettings(
            state_dir=state_dir,
            pod_uid=settings.pod_uid,
            served_model_name=served_name,
            software=f"modelswap {__version__}",
            weight_peers=(*SwapSettings.weight_peers, *settings.weight_peer),
            export_roots=settings.export_root,
            # Outside a cluster nobody probes and nothing routes, so there is nothing to wait for.
            propagation_seconds=settings.propagation_seconds if settings.pod_uid else 0.0,
            probe_seconds=PROBE_SECONDS if settings.pod_uid else 0.0,
            previous_seconds=settings.previous_seconds,
            previous_bytes=settings.previous_bytes,
            audit_seconds=settings.audit_seconds,
            audit_bytes_per_second=settings.audit_bytes_per_second,
            repair_attempts=settings.repair_attempts,
            growth=GrowthLimits(swaps=settings.restart_after_swaps),
            debug_checks=settings.debug_checks,
            reclaim_seconds=settings.reclaim_seconds,
        ),
        listeners=[resources],
        encode=resources.encode,
        transfers=backend,
        companion=adapters,
    )


async def _authenticator(settings: ServeSettings) -> Authenticator:
    if settings.insecure:
        return InsecureAuthenticator()
    if settings.auth is Auth.KUBERNETES:
        return await cluster_authenticator(
            pod_uid=settings.pod_uid, subjects=frozenset(settings.allowed_subject), environment=os.environ
        )
    if settings.token_file is None:
        raise BadRequest("--auth token-file needs --token-file", advice="pass --token-file FILE")
    tokens = TokenFileAuthenticator(settings.token_file)
    await tokens.load()
    return tokens


def _assignment(directory: Path | None) -> Assignment | None:
    """Read the mounted assignment; an optional mount that is empty means that nothing was assigned yet."""
    if directory is None:
        return None
    path = directory / ASSIGNMENT_KEY
    try:
        return decode(path.read_bytes(), Assignment)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRequest(f"assignment {path}: {error.strerror}", advice="check the volume mount") from None


async def _start(coordinator: Coordinator, template: VersionRef, settings: ServeSettings) -> None:
    """Load what must be served.

    In a pod a failure is retried for ever: the state tells the operator why. A person at a terminal gets the error.
    """
    reread = partial(_assignment, settings.assignment_dir)
    await coordinator.start(template, await asyncio.to_thread(reread), reread=reread)
    state = coordinator.state()
    if state.live is None and not settings.pod_uid:
        raise NotReady(f"nothing could be served: {state.message}", advice="see the reason above and start again")
    if state.live is not None:
        _log.info("serving", model=state.served_model_name, version=state.live.version, digest=state.live.digest)


def _signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            _log.warning("second signal, leaving at once")
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


async def _unless_stopped(stopping: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Do the work; False when a signal came first."""
    starting, signalled = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return starting.done()
    finally:
        for task in (starting, signalled):
            task.cancel()
        await asyncio.gather(starting, signalled, return_exceptions=True)


async def _drain(coordinator: Coordinator, settings: ServeSettings) -> None:
    began = time.monotonic()
    _log.info("stopping: not ready, waiting for requests in flight", at_most_seconds=settings.drain_seconds)
    await coordinator.drain(settings.drain_seconds)
    _log.info("drained", seconds=round(time.monotonic() - began, 3))
