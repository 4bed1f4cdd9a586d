"""The embedded engine's process: wires backend, sources, coordinator and the two ports."""

from dataclasses import dataclass
from pathlib import Path

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import CommitMethod, Device, EmbeddedSettings
from modelswap_engine.cli import hosting
from modelswap_engine.cli.hosting import HostSettings
from modelswap_engine.cli.sharing import shared_of
from modelswap_engine.cli.sources import supply_of
from modelswap_engine.http.app import control_app, data_app
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.openai.routes import DataSettings
from modelswap_engine.http.resources import VersionResources
from modelswap_engine.http.spool import Spool
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import MIB, LoraSettings
from modelswap_engine.lora.vouching import Vouching
from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.sources.registry import Sources
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.settings import SwapSettings


@dataclass(frozen=True, kw_only=True)
class ServeSettings(HostSettings):
    """The options of ``modelswap serve``, see there."""

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
    reclaim_seconds: float
    weight_loader: tuple[str, ...]
    weight_peer: tuple[str, ...]
    export_root: tuple[Path, ...]
    commit_method: CommitMethod


def run_embedded(settings: ServeSettings) -> None:
    """Serve until a signal.

    Raises:
        ModelswapError: it could not start.
    """
    hosting.run(settings, _serve(settings))


async def _serve(settings: ServeSettings) -> None:
    template = hosting.template_of(settings)
    stopping = hosting.signals()
    served_name = settings.served_model_name or template.name
    authenticator = await hosting.authenticator(settings)
    backend = EmbeddedBackend(_engine(settings))
    resources = VersionResources()
    clock, supply = SystemClock(), supply_of(settings, template=template)
    adapters = AdapterDesk(
        host=backend,
        opener=supply.sources,
        clock=clock,
        settings=_lora(settings, served_name=served_name),
        vouching=Vouching(hosting.signatures(settings)),
    )
    coordinator = _coordinator(
        settings,
        backend=backend,
        sources=supply.sources,
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
        shared=await shared_of(settings, store=supply.store, records=supply.records, given=metrics.served_bytes.inc),
    )
    data = data_app(
        coordinator=coordinator,
        backend=backend,
        resources=resources,
        metrics=metrics,
        settings=DataSettings(served_model_name=served_name, context_limit=settings.kv_blocks * settings.page_size),
        adapters=adapters,
    )
    await hosting.serve_ports(
        settings,
        control=control,
        data=data,
        coordinator=coordinator,
        template=template,
        metrics=metrics,
        stopping=stopping,
    )


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
        settings=hosting.swap_settings(
            settings,
            served_name=served_name,
            weight_peers=(*SwapSettings.weight_peers, *settings.weight_peer),
            export_roots=settings.export_root,
            reclaim_seconds=settings.reclaim_seconds,
        ),
        listeners=[resources],
        encode=resources.encode,
        transfers=backend,
        companion=adapters,
        signatures=hosting.signatures(settings),
    )
