"""``modelswap serve``: the options, and nothing of what they start."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from modelswap_engine.backends.embedded.settings import CommitMethod, Device
from modelswap_engine.protocol.errors import BadRequest


class Auth(StrEnum):
    """How callers of the control port prove who they are."""

    KUBERNETES = "kubernetes"
    TOKEN_FILE = "token-file"  # noqa: S105 - the name of a method, not a secret


class Logs(StrEnum):
    """Form of the log: lines for people on a terminal, JSON elsewhere."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


def serve(
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint to serve when nothing else was assigned.")],
    served_model_name: Annotated[str, typer.Option(help="Model name in the API; default: the folder's name.")] = "",
    version: Annotated[str, typer.Option(help="Label of the version in --model.")] = "",
    host: Annotated[str, typer.Option(help="Address both ports listen on.")] = "0.0.0.0",  # noqa: S104 - pods are reached by their address
    port: Annotated[int, typer.Option(help="Data port (OpenAI API).")] = 8000,
    control_port: Annotated[int, typer.Option(help="Control port.")] = 8001,
    state_dir: Annotated[
        Path | None, typer.Option(help="Journal and side files, kept across restarts. Default: by control port.")
    ] = None,
    allow_root: Annotated[
        list[Path] | None, typer.Option(help="Folder versions may come from, besides --model.")
    ] = None,
    assignment_dir: Annotated[Path | None, typer.Option(help="Where the slot's assignment is mounted.")] = None,
    auth: Annotated[Auth | None, typer.Option(help="How callers of the control port prove who they are.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Accepted tokens, one a line; read again on change.")] = None,
    allowed_subject: Annotated[list[str] | None, typer.Option(help="Accepted service account (repeatable).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Ask nobody who they are. Never in a cluster.")] = False,
    pod_uid: Annotated[str, typer.Option(envvar="MODELSWAP_POD_UID", help="UID of the pod.")] = "",
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
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait at the closed gate.")] = 1024,
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
    drain_seconds: Annotated[float, typer.Option(min=0, help="SIGTERM: wait so long for requests in flight.")] = 60.0,
    propagation_seconds: Annotated[
        float, typer.Option(min=0, help="In a pod: from not ready until no endpoint routes here any more.")
    ] = 2.0,
    previous_seconds: Annotated[
        float, typer.Option(min=0, help="How long a previous version is retained; 0: as long as there is room.")
    ] = 0.0,
    previous_bytes: Annotated[
        int, typer.Option(min=-1, help="A previous version of more bytes is not retained; -1: any size is.")
    ] = -1,
    audit_seconds: Annotated[
        float, typer.Option(min=0, help="How often all live tensors are hashed again; 0: only after swaps.")
    ] = 3600.0,
    audit_bytes_per_second: Annotated[int, typer.Option(min=0, help="Upper bound of that; 0: none.")] = 256 << 20,
    repair_attempts: Annotated[
        int, typer.Option(min=0, help="How often damaged live tensors are loaded again before giving up; 0: never.")
    ] = 5,
    restart_after_swaps: Annotated[
        int, typer.Option(min=0, help="Advise a cold restart after so many swaps; 0: only when memory grows.")
    ] = 0,
    commit_method: Annotated[
        CommitMethod, typer.Option(help="How tensors become live; auto copies where addresses are held.")
    ] = CommitMethod.AUTO,
    debug_checks: Annotated[
        bool, typer.Option("--debug-checks", help="Allow snapshots of live tensors and comparing with them.")
    ] = False,
    logs: Annotated[Logs, typer.Option(help="Form of the log.")] = Logs.AUTO,
) -> None:
    """Serve a model: OpenAI API on the data port, weight swaps through the control port."""
    settings = locals()
    _check_auth(auth=auth, token_file=token_file, subjects=allowed_subject, insecure=insecure, pod_uid=pod_uid)
    try:
        from modelswap_engine.cli.serve import ServeSettings, run
    except ModuleNotFoundError as error:
        raise BadRequest(
            f"`modelswap serve` needs the package {error.name}", advice="pip install 'modelswap[engine]'"
        ) from None
    settings["state_dir"] = state_dir or _default_state_dir(control_port)
    settings["allow_root"] = tuple(allow_root or ())
    settings["allowed_subject"] = tuple(allowed_subject or ())
    settings["weight_loader"] = tuple(weight_loader or ())
    settings["weight_peer"] = tuple(weight_peer or ())
    settings["export_root"] = tuple(export_root or ())
    run(ServeSettings(**settings))


def _check_auth(
    *, auth: Auth | None, token_file: Path | None, subjects: list[str] | None, insecure: bool, pod_uid: str
) -> None:
    if insecure:
        if auth is not None or token_file is not None:
            raise BadRequest("--insecure and --auth/--token-file exclude each other", advice="leave one of them out")
        return
    if auth is None and token_file is None:
        raise BadRequest(
            "no way to authenticate callers of the control port",
            advice="pass --token-file FILE, or --auth kubernetes in a pod (or --insecure on a machine of your own)",
        )
    if auth is Auth.KUBERNETES and not (pod_uid and subjects):
        raise BadRequest(
            "--auth kubernetes needs --pod-uid (MODELSWAP_POD_UID) and at least one --allowed-subject",
            advice="set the pod UID by the downward API and name the operator's service account",
        )
    if auth is Auth.TOKEN_FILE and token_file is None:
        raise BadRequest("--auth token-file needs --token-file", advice="pass --token-file FILE")


def _default_state_dir(control_port: int) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "modelswap" / str(control_port)
