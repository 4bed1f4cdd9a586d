"""The engines that ``modelswap proxy`` stands before, and what drives each of them by which route."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import aiohttp

from modelswap_engine.backends.adapters import AdapterHost, AdapterOptions
from modelswap_engine.backends.external.adapter_folders import AdapterFolders
from modelswap_engine.backends.external.adapters import AdapterControl, ExternalAdapters, NoAdapters
from modelswap_engine.backends.external.backend import ExternalBackend
from modelswap_engine.backends.external.control import EngineControl, Requests
from modelswap_engine.backends.external.handshake import Boot, UntrustedError, read_boot
from modelswap_engine.backends.external.loading import Starting
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.port import Backend
from modelswap_engine.backends.sglang.adapters import SglangAdapters
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.plain import plain_sglang
from modelswap_engine.backends.sglang.pulse import Pulse
from modelswap_engine.backends.vllm.adapters import VllmAdapters
from modelswap_engine.backends.vllm.control import VllmControl
from modelswap_engine.backends.vllm.plain import plain_vllm
from modelswap_engine.cli.engine_choice import Engine, Route
from modelswap_engine.protocol.errors import BadRequest

_PLAIN_SGLANG_WATCH: Final = 2.0
"""Seconds from one look to the next where each costs the engine a token."""


class Driven(Backend, Protocol):
    """A backend whose requests are carried by the proxy."""

    @property
    def served_name(self) -> str:
        """The engine's own name of the base model, "" while it is not known."""

    def suspect(self) -> None:
        """Somebody saw the engine fail: it is looked at now."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an engine is, and what the sidecar shares with its container.

    Attributes:
        url: of the engine.
        session: for its control side alone.
        seconds: how long it may take to answer for the first time.
        folder: for files that it loads; it sees them under the same path.
        adapter_dir: for its adapters, the same way; what is below may take ``adapter_bytes`` in all, 0 for no limit.
        runtime_dir: where its launcher says what it started; None without one.
        starting: tells the launcher what to start on; None without one.
        unverifiable: serve versions of which it does not show every tensor.
    """

    url: str
    session: aiohttp.ClientSession
    seconds: float
    folder: Path
    adapter_dir: Path
    adapter_bytes: int
    runtime_dir: Path | None
    starting: Starting | None
    unverifiable: bool


def driven(
    engine: Engine, route: Route, place: Place, *, requests: Requests, restart: RestartWish
) -> tuple[Driven, AdapterHost]:
    """Return what drives an engine, and its adapters.

    Raises:
        BadRequest: the options contradict each other.
    """
    if place.unverifiable and (engine, route) != (Engine.VLLM, Route.PLAIN):
        raise BadRequest("--allow-unverifiable: every tensor is proved by this route", advice="leave it out")
    bounds = ExternalSettings(reach=place.seconds)
    if route is Route.PLAIN:
        why = "it is driven by its plain routes, with nothing of modelswap in it"
        refused = NoAdapters(why, options=AdapterOptions(slots="--route in-process"))
        return _plain(engine, place, bounds, requests=requests, restart=restart), refused
    control, routes = _controls(engine, place)
    adapters = ExternalAdapters(routes, AdapterFolders(place.adapter_dir, limit_bytes=place.adapter_bytes))
    backend = ExternalBackend(
        control,
        requests=requests,
        restart=restart,
        settings=bounds,
        starting=place.starting,
        adapters=adapters,
        launched=partial(_launched, place.runtime_dir),
    )
    return backend, adapters


def _plain(
    engine: Engine, place: Place, bounds: ExternalSettings, *, requests: Requests, restart: RestartWish
) -> Driven:
    match engine:
        case Engine.VLLM:
            return plain_vllm(
                VllmControl(place.url, place.session),
                folder=place.folder,
                requests=requests,
                restart=restart,
                settings=bounds,
                starting=place.starting,
                started_on=partial(_started_on, place.runtime_dir),
                launched=partial(_launched, place.runtime_dir),
                unverifiable=place.unverifiable,
            )
        case Engine.SGLANG:
            return plain_sglang(
                _sglang(place),
                folder=place.folder,
                requests=requests,
                restart=restart,
                settings=replace(bounds, watch=_PLAIN_SGLANG_WATCH),
                starting=place.starting,
            )


def _controls(engine: Engine, place: Place) -> tuple[EngineControl, AdapterControl]:
    match engine:
        case Engine.VLLM:
            control = VllmControl(place.url, place.session)
            return control, VllmAdapters(control)
        case Engine.SGLANG:
            client = _sglang(place)
            return SglangControl(client, pulse=Pulse(client)), SglangAdapters(client)


def _sglang(place: Place) -> SglangClient:
    started = None if place.runtime_dir is None else partial(read_boot, place.runtime_dir)
    return SglangClient(place.url, started=started)


def _started_on(runtime: Path | None) -> str:
    boot = _boot(runtime)
    return boot.digest if boot is not None else ""


def _launched(runtime: Path | None) -> str:
    boot = _boot(runtime)
    return boot.boot_id if boot is not None else ""


def _boot(runtime: Path | None) -> Boot | None:
    try:
        return read_boot(runtime) if runtime is not None else None
    except UntrustedError:
        return None
