"""``modelswap adapter load|unload|list``: LoRA adapters of a running engine."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from modelswap_engine.cli.options import CredentialsName, Digest, Format, Output, TokenFile, Url
from modelswap_engine.protocol.adapter_calls import LoadAdapterRequest, UnloadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterRegistry, AdapterSource, AdapterStatus
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import StateMoved
from modelswap_engine.protocol.messages import Fence

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelswap_engine.cli.client import ControlClient

_URL: Final = "http://127.0.0.1:8001"
_ATTEMPTS: Final = 5

Name = Annotated[str, typer.Argument(help="The model name that clients ask for.")]
Folder = Annotated[str, typer.Option("--source", help="Folder with adapter_config.json and adapter_model.safetensors.")]
Base = Annotated[str, typer.Option("--base-digest", help="The only base that it may be used with (sha256:…).")]
Pinned = Annotated[bool, typer.Option("--pinned", help="Keep it in a slot.")]
Drain = Annotated[float, typer.Option("--drain-seconds", help="How long to wait for requests of the old content.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="LoRA adapters on the running base.", no_args_is_help=True)
    group.command("load")(load)
    group.command("unload")(unload)
    group.command("list")(list_)
    app.add_typer(group, name="adapter")


def load(
    name: Name,
    source: Folder,
    digest: Digest = "",
    base_digest: Base = "",
    pinned: Pinned = False,
    credentials: CredentialsName = "",
    drain: Drain = 60.0,
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Load an adapter; other content under a known name takes the name over."""
    from modelswap_engine.cli import render

    uri = source if ":" in source.split("/", 1)[0] else Path(source).resolve().as_uri()
    wanted = AdapterSource(
        name=name, uri=uri, digest=digest, base_digest=base_digest, pinned=pinned, credentials=credentials
    )
    client = _client(url, token_file)

    def send(fence: Fence, etag: str) -> AdapterStatus:
        request = LoadAdapterRequest(fence=fence, source=wanted, drain_timeout_seconds=drain)
        return client.post("/adapters", request, AdapterStatus, if_match=etag)

    _show(_decided(client, name, send), output, render.adapter)


def unload(
    name: Name,
    drain: Drain = 60.0,
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Unload an adapter: its name is gone at once, its memory when its last request has ended."""
    from modelswap_engine.cli import render

    client = _client(url, token_file)

    def send(fence: Fence, etag: str) -> AdapterStatus:
        request = UnloadAdapterRequest(fence=fence, drain_timeout_seconds=drain)
        return client.delete(f"/adapters/{quote(name, safe='')}", request, AdapterStatus, if_match=etag)

    _show(_decided(client, name, send), output, render.adapter)


def list_(url: Url = _URL, token_file: TokenFile = None, output: Format = Output.TEXT) -> None:
    """Show the adapters, and what there is room for."""
    from modelswap_engine.cli import render

    _show(_client(url, token_file).get("/adapters", AdapterRegistry), output, render.adapters)


def _decided(client: "ControlClient", name: str, send: Callable[[Fence, str], AdapterStatus]) -> AdapterStatus:
    """Decide on the state as it is, and again when it moved meanwhile (a request ended, a lease ran out)."""
    for _ in range(_ATTEMPTS):
        now = client.get("/state", EngineState)
        registry = now.adapters or AdapterRegistry()
        known = [status.revision for status in registry.adapters if status.name == name]
        # Also of an assigned name a person may decide; the operator overrules that with its next decision.
        revision = max([*known, registry.assigned.revision if registry.assigned is not None else 0])
        fence = Fence(pod_uid=now.pod_uid, owner_uid="cli", epoch=now.epoch, revision=revision + 1)
        with contextlib.suppress(StateMoved):
            return send(fence, f'"{now.boot_id}.{now.seq}"')
    raise StateMoved("the engine's state keeps moving", advice="look at `modelswap state` and try again")


def _client(url: str, token_file: Path | None) -> "ControlClient":
    from modelswap_engine.cli.client import connect

    return connect(url, token_file)


def _show(message: object, output: Output, text: "Callable[[Any], RenderableType]") -> None:
    from modelswap_engine.cli.client import pretty
    from modelswap_engine.cli.render import out

    if output is Output.JSON:
        typer.echo(pretty(message))
    else:
        out(text(message))
