"""``modelswap proxy``: the options, and nothing of what they start."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from modelswap_engine.cli import host_options
from modelswap_engine.cli.host_options import ANY_ADDRESS, Logs


class Engine(StrEnum):
    """Engines that ``modelswap proxy`` stands before."""

    VLLM = "vllm"
    SGLANG = "sglang"


class Route(StrEnum):
    """How weights are exchanged in the engine."""

    IN_PROCESS = "in-process"
    PLAIN = "plain"


class EngineRestart(StrEnum):
    """Whether the engine's container may be restarted when only that helps."""

    ALLOWED = "allowed"
    NEVER = "never"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(proxy)


def proxy(
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
    served_model_name: host_options.ServedModelName = "",
    version: host_options.Version = "",
    host: host_options.Host = ANY_ADDRESS,
    port: host_options.Port = 8000,
    control_port: host_options.ControlPort = 8001,
    control_tls_cert: host_options.ControlTlsCert = None,
    control_tls_key: host_options.ControlTlsKey = None,
    state_dir: host_options.StateDir = None,
    allow_root: host_options.AllowRoot = None,
    allow_source: host_options.AllowSource = None,
    allow_private_redirects: host_options.AllowPrivateRedirects = False,
    credentials_dir: host_options.CredentialsDir = None,
    source_credentials: host_options.SourceCredentials = None,
    claim: host_options.Claim = None,
    store_dir: host_options.StoreDir = None,
    store_size: host_options.StoreSize = "",
    require_signature: host_options.RequireSignature = False,
    trusted_keys: host_options.TrustedKeys = None,
    peers: host_options.PeersOption = None,
    peer_token_file: host_options.PeerTokenFile = None,
    peer_ca_file: host_options.PeerCaFile = None,
    peer_server_name: host_options.PeerServerName = "",
    peer_bytes_per_second: host_options.PeerBytesPerSecond = host_options.PEER_BYTES_PER_SECOND,
    assignment_dir: host_options.AssignmentDir = None,
    auth: host_options.AuthOption = None,
    token_file: host_options.TokenFile = None,
    allowed_subject: host_options.AllowedSubject = None,
    insecure: host_options.Insecure = False,
    pod_uid: host_options.PodUid = "",
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
    max_queue: host_options.MaxQueue = 1024,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest request body, in MiB.")] = 32,
    engine_seconds: Annotated[
        float, typer.Option(min=1, help="How long the engine may take to answer for the first time.")
    ] = 600.0,
    silent_seconds: Annotated[float, typer.Option(min=1, help="How long it may say nothing within a request.")] = 600.0,
    drain_seconds: host_options.DrainSeconds = 60.0,
    propagation_seconds: host_options.PropagationSeconds = 2.0,
    previous_seconds: host_options.PreviousSeconds = 0.0,
    previous_bytes: host_options.PreviousBytes = -1,
    audit_seconds: host_options.AuditSeconds = 3600.0,
    audit_bytes_per_second: host_options.AuditBytesPerSecond = 256 << 20,
    repair_attempts: host_options.RepairAttempts = 5,
    restart_after_swaps: host_options.RestartAfterSwaps = 0,
    debug_checks: host_options.DebugChecks = False,
    logs: host_options.LogForm = Logs.AUTO,
) -> None:
    """Stand before an engine's own server: the only door to it, and weight swaps inside it through the control port."""
    options = host_options.settled(locals())
    try:
        from modelswap_engine.cli.proxy import ProxySettings, run_proxy
    except ModuleNotFoundError as error:
        raise host_options.needs("proxy", error, extra="sidecar") from None
    run_proxy(ProxySettings(**options))
