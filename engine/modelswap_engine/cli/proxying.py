"""``modelswap proxy``: the options, and nothing of what they start."""

from pathlib import Path
from typing import Annotated

import typer

from modelswap_engine.cli.engine_choice import Engine, EngineRestart, Route
from modelswap_engine.cli.groups import grouped
from modelswap_engine.cli.host_options import DebugChecks, Door, LogForm, Logs, MaxQueue, Upkeep, needs, settled


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(grouped(proxy))


def proxy(
    *,
    backend: Annotated[Engine, typer.Option(help="Which engine it is.")],
    upstream: Annotated[str, typer.Option(help="Where the engine listens, http://127.0.0.1:PORT.")],
    model: Annotated[str, typer.Option(help="Checkpoint that the engine is started on: a folder, or a URI.")],
    route: Annotated[
        Route,
        typer.Option(
            help="in-process: modelswap's half in the engine's processes exchanges weights. "
            "plain: the engine's own HTTP routes do, from files that are laid out for it."
        ),
    ] = Route.IN_PROCESS,
    allow_unverifiable: Annotated[
        bool, typer.Option(help="With --route plain: serve versions of which the engine does not show every tensor.")
    ] = False,
    door: Door,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Where whole checkpoints are laid out for the engine's launcher.")
    ] = None,
    checkpoint_bytes: Annotated[int, typer.Option(min=0, help="What they may take; 0: what the volume has.")] = 0,
    runtime_dir: Annotated[
        Path | None, typer.Option(help="Memory volume that is shared with the engine's launcher.")
    ] = None,
    adapter_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where LoRA adapters are laid out for the engine, which must see it under the same path. "
            "Default: in --checkpoint-dir, else in the state directory."
        ),
    ] = None,
    lora_host_mib: Annotated[int, typer.Option(min=1, help="What all adapters may take in the engine, in MiB.")] = 1024,
    engine_restart: Annotated[
        EngineRestart, typer.Option(help="Whether the engine's container may be restarted when only that helps.")
    ] = EngineRestart.ALLOWED,
    max_queue: MaxQueue = 1024,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest request body, in MiB.")] = 32,
    engine_seconds: Annotated[
        float, typer.Option(min=1, help="How long the engine may take to answer for the first time.")
    ] = 600.0,
    silent_seconds: Annotated[float, typer.Option(min=1, help="How long it may say nothing within a request.")] = 600.0,
    upkeep: Upkeep,
    debug_checks: DebugChecks = False,
    logs: LogForm = Logs.AUTO,
) -> None:
    """Stand before an engine's own server: the only door to it, and weight swaps inside it through the control port."""
    options = settled(door, locals())
    try:
        from modelswap_engine.cli.proxy import ProxySettings, run_proxy
    except ModuleNotFoundError as error:
        raise needs("proxy", error, extra="sidecar") from None
    run_proxy(ProxySettings(**options))
