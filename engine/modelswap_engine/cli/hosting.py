"""What every serving process is made of, whichever engine it drives: options, ports, signals, and a good end.

Both ports are bound before a version is loaded, so that a wrong port is an error at once and probes get answers
meanwhile. SIGTERM: not ready → clients move away → drain → exit; a second signal ends at once.
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
from typing import Any

import structlog
from aiohttp import web

from modelswap_engine import __version__
from modelswap_engine.cli.allocator import one_heap
from modelswap_engine.cli.host_options import Auth, Logs
from modelswap_engine.cli.logs import configure
from modelswap_engine.http.app import listening
from modelswap_engine.http.auth import Authenticator, InsecureAuthenticator, TokenFileAuthenticator
from modelswap_engine.http.cluster import cluster_authenticator
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.tls import certified
from modelswap_engine.protocol.assignment import ASSIGNMENT_KEY, Assignment
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.errors import BadRequest, Internal, ModelswapError, NotReady
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.telemetry import export
from modelswap_engine.signing.policy import Signatures
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.growth import GrowthLimits
from modelswap_engine.swap.settings import SwapSettings

PROBE_SECONDS = 15.0

_log = structlog.get_logger("modelswap.serve")


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The options that all of them have, see ``modelswap serve``."""

    model: str
    served_model_name: str
    version: str
    host: str
    port: int
    control_port: int
    control_tls_cert: Path | None
    control_tls_key: Path | None
    state_dir: Path
    allow_root: tuple[Path, ...]
    allow_source: tuple[str, ...]
    allow_private_redirects: bool
    credentials_dir: Path | None
    source_credentials: tuple[tuple[str, str], ...]
    claim: tuple[tuple[str, Path], ...]
    store_dir: Path | None
    store_bytes: int
    store_shared: bool
    require_signature: bool
    trusted_keys: Path | None
    peers: tuple[tuple[str, int], ...]
    peer_token_file: Path | None
    peer_ca_file: Path | None
    peer_server_name: str
    peer_bytes_per_second: int
    assignment_dir: Path | None
    auth: Auth | None
    token_file: Path | None
    allowed_subject: tuple[str, ...]
    insecure: bool
    pod_uid: str
    max_queue: int
    drain_seconds: float
    propagation_seconds: float
    previous_seconds: float
    previous_bytes: int
    audit_seconds: float
    audit_bytes_per_second: int
    repair_attempts: int
    restart_after_swaps: int
    debug_checks: bool
    logs: Logs


def run(settings: HostSettings, work: Coroutine[None, None, None]) -> None:
    """Do the work of a serving process until a signal.

    Raises:
        ModelswapError: it could not start.
    """
    one_heap()
    configure(json=settings.logs is Logs.JSON or (settings.logs is Logs.AUTO and not sys.stderr.isatty()))
    export("modelswap-engine")
    try:
        asyncio.run(work)
    except ModelswapError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: a person gets one line, the log the rest
        _log.error("unexpected error", exc_info=error)
        raise Internal(f"the engine ended by a defect: {type(error).__name__}", advice="report the log above") from None


@dataclass(frozen=True, kw_only=True)
class Template:
    """The version that is served when nothing else was assigned; ``folder`` where it is one of this machine."""

    uri: str
    name: str
    folder: Path | None = None


def template_of(settings: HostSettings) -> Template:
    """Return what ``--model`` names: a folder, or a place to fetch from.

    Raises:
        BadRequest: it is neither.
    """
    if "://" in settings.model:
        return Template(uri=settings.model, name=settings.model.rstrip("/").rpartition("/")[2])
    folder = Path(settings.model).resolve()
    if not folder.is_dir():
        raise BadRequest(
            f"--model {settings.model}: no such folder", advice="pass the folder of a checkpoint, or its URI"
        )
    return Template(uri=folder.as_uri(), name=folder.name, folder=folder)


def signatures(settings: HostSettings) -> Signatures:
    """Return what is asked of versions and adapters."""
    return Signatures(required=settings.require_signature, trusted=settings.trusted_keys)


def swap_settings(settings: HostSettings, *, served_name: str, **more: Any) -> SwapSettings:
    """Return the bounds of the swap; ``more`` are those that only some engines have."""
    return SwapSettings(
        state_dir=settings.state_dir.resolve(),
        pod_uid=settings.pod_uid,
        served_model_name=served_name,
        software=f"modelswap {__version__}",
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
        **more,
    )


async def authenticator(settings: HostSettings) -> Authenticator:
    """Return what looks at the tokens of the control port's callers."""
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


async def _start(coordinator: Coordinator, template: VersionRef, settings: HostSettings) -> None:
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


async def serve_ports(
    settings: HostSettings,
    *,
    control: web.Application,
    data: web.Application,
    coordinator: Coordinator,
    template: Template,
    metrics: Metrics,
    stopping: asyncio.Event,
) -> None:
    """Listen on both ports, load what must be served, and serve until told to stop."""
    async with (
        certified(
            settings.control_tls_cert,
            settings.control_tls_key,
            clock=SystemClock(),
            expires=metrics.certificate_expires,
        ) as tls,
        listening(control, host=settings.host, port=settings.control_port, cancel_abandoned=False, tls=tls),
        listening(data, host=settings.host, port=settings.port, cancel_abandoned=True),
    ):
        _log.info(
            "listening", host=settings.host, port=settings.port, control_port=settings.control_port, tls=tls is not None
        )
        first = VersionRef(version=settings.version or template.name, uri=template.uri)
        try:
            if await _unless_stopped(stopping, _start(coordinator, first, settings)):
                await stopping.wait()
                await _drain(coordinator, settings)
        finally:
            await coordinator.stop()


def signals() -> asyncio.Event:
    """Return what is set by the first signal to end; the second one ends at once."""
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


async def _drain(coordinator: Coordinator, settings: HostSettings) -> None:
    began = time.monotonic()
    _log.info("stopping: not ready, waiting for requests in flight", at_most_seconds=settings.drain_seconds)
    await coordinator.drain(settings.drain_seconds)
    _log.info("drained", seconds=round(time.monotonic() - began, 3))
