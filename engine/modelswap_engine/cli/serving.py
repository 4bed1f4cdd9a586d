"""``modelswap serve``: the options, and nothing of what they start."""

from pathlib import Path
from typing import Annotated

import typer

from modelswap_engine.backends.embedded.settings import CommitMethod, Device
from modelswap_engine.cli.groups import grouped
from modelswap_engine.cli.host_options import DebugChecks, Door, LogForm, Logs, MaxQueue, Upkeep, needs, settled


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(grouped(serve))


def serve(
    *,
    model: Annotated[str, typer.Option(help="Checkpoint to serve when nothing else was assigned: a folder, or a URI.")],
    door: Door,
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
    max_queue: MaxQueue = 1024,
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
    upkeep: Upkeep,
    commit_method: Annotated[
        CommitMethod, typer.Option(help="How tensors become live; auto copies where addresses are held.")
    ] = CommitMethod.AUTO,
    debug_checks: DebugChecks = False,
    logs: LogForm = Logs.AUTO,
) -> None:
    """Serve a model: OpenAI API on the data port, weight swaps through the control port."""
    options = settled(door, locals())
    try:
        from modelswap_engine.cli.serve import ServeSettings, run_embedded
    except ModuleNotFoundError as error:
        raise needs("serve", error) from None
    run_embedded(ServeSettings(**options))
