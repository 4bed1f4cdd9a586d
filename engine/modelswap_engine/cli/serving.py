"""``modelswap serve``: the options, and nothing of what they start."""

from pathlib import Path
from typing import Annotated

import typer

from modelswap_engine.backends.embedded.settings import CommitMethod, Device
from modelswap_engine.cli import host_options
from modelswap_engine.cli.host_options import ANY_ADDRESS, Logs


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    model: Annotated[str, typer.Option(help="Checkpoint to serve when nothing else was assigned: a folder, or a URI.")],
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
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass.")] = 512,
    kv_blocks: Annotated[int, typer.Option(min=2, help="Blocks of the KV cache.")] = 512,
    device: Annotated[
        Device, typer.Option(help="Where the model runs; auto: a GPU where torch sees one, else the CPU.")
    ] = Device.AUTO,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in one block.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Processes that hold one model together.")] = 1,
    data_parallel: Annotated[int, typer.Option(min=1, help="Replicas of the model, each with its processes.")] = 1,
    lora_slots: Annotated[int, typer.Option(min=0, help="LoRA adapters that one batch can use; 0: none.")] = 0,
    lora_max_rank: Annotated[int, typer.Option(min=1, help="Highest rank of an adapter.")] = 64,
    lora_host_mib: Annotated[int, typer.Option(min=1, help="Memory for all adapters, in MiB.")] = 1024,
    lora_slot_mib: Annotated[int, typer.Option(min=0, help="For those in slots; 0: what the slots hold.")] = 0,
    lora_max_pinned: Annotated[
        int | None, typer.Option(min=0, help="Adapters that may be pinned. Default: all slots but one.")
    ] = None,
    max_queue: host_options.MaxQueue = 1024,
    weight_loader: Annotated[
        list[str] | None, typer.Option(help="Custom weight loader that updates may name, package.module:function.")
    ] = None,
    reclaim_seconds: Annotated[
        float, typer.Option(min=0, help="Overlap: end what the old instance still answers after so long.")
    ] = 30.0,
    weight_peer: Annotated[
        list[str] | None, typer.Option(help="Network (CIDR) to exchange weights with, besides this host.")
    ] = None,
    export_root: Annotated[list[Path] | None, typer.Option(help="Folder below which weights may be saved.")] = None,
    drain_seconds: host_options.DrainSeconds = 60.0,
    propagation_seconds: host_options.PropagationSeconds = 2.0,
    previous_seconds: host_options.PreviousSeconds = 0.0,
    previous_bytes: host_options.PreviousBytes = -1,
    audit_seconds: host_options.AuditSeconds = 3600.0,
    audit_bytes_per_second: host_options.AuditBytesPerSecond = 256 << 20,
    repair_attempts: host_options.RepairAttempts = 5,
    restart_after_swaps: host_options.RestartAfterSwaps = 0,
    commit_method: Annotated[
        CommitMethod, typer.Option(help="How tensors become live; auto copies where addresses are held.")
    ] = CommitMethod.AUTO,
    debug_checks: host_options.DebugChecks = False,
    logs: host_options.LogForm = Logs.AUTO,
) -> None:
    """Serve a model: OpenAI API on the data port, weight swaps through the control port."""
    options = host_options.settled(locals())
    try:
        from modelswap_engine.cli.serve import ServeSettings, run_embedded
    except ModuleNotFoundError as error:
        raise host_options.needs("serve", error) from None
    run_embedded(ServeSettings(**options))
