"""``modelswap state|plan|swap|rollback|release|cancel|check|pause|resume``: what a person does to a running engine."""

import contextlib
import hashlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelswap_engine.cli.options import (
    Adapters,
    CredentialsName,
    Digest,
    Format,
    Incompatible,
    Label,
    Late,
    LoadMode,
    Mode,
    Output,
    Source,
    Timeout,
    TokenFile,
    Url,
    Verify,
    Wait,
)
from modelswap_engine.protocol.adapters import AdapterChange, AdapterSource, OnIncompatible
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import BadRequest, NotFound, StateMoved
from modelswap_engine.protocol.messages import (
    CancelRequest,
    CheckAction,
    CheckRequest,
    CheckResult,
    Fence,
    PauseRequest,
    Plan,
    PlanRequest,
    ReleaseRequest,
    ResumeRequest,
    RollbackRequest,
    SwapRequest,
    SwapStatus,
    VersionRef,
)
from modelswap_engine.protocol.policy import (
    LONGEST_DRAIN_SECONDS,
    Checks,
    Loading,
    LoadingMode,
    OnTimeout,
    PromptCheck,
    Traffic,
    TrafficMode,
    VerifyMode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from modelswap_engine.cli.client import ControlClient


_URL = "http://127.0.0.1:8001"
ATTEMPTS = 5


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (state, plan, swap, rollback, release, cancel, check, pause, resume):
        app.command()(command)


def state(url: Url = _URL, token_file: TokenFile = None, output: Format = Output.TEXT) -> None:
    """Show what the engine serves and what it is doing."""
    from modelswap_engine.cli import render

    _show(_client(url, token_file).get("/state", EngineState), output, render.state)


def plan(
    source: Source,
    version: Label = "",
    digest: Digest = "",
    credentials: CredentialsName = "",
    mode: Mode = TrafficMode.DRAIN,
    loading: LoadMode = LoadingMode.AUTO,
    adapter: Adapters = None,
    on_incompatible: Incompatible = OnIncompatible.BLOCK,
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Show what a swap would do, without doing it; exit code 1 when it would be refused."""
    from modelswap_engine.cli import render

    request = PlanRequest(
        target=VersionRef(version=version, uri=_uri(source), digest=digest, credentials=credentials),
        traffic=Traffic(mode=mode),
        loading=Loading(mode=loading),
        adapters=_adapters(adapter, base_digest=digest, on_incompatible=on_incompatible),
    )
    found = _client(url, token_file).post("/plan", request, Plan)
    _show(found, output, render.plan)
    if found.refusals:
        raise typer.Exit(1)


def swap(
    source: Source,
    version: Label = "",
    digest: Digest = "",
    credentials: CredentialsName = "",
    mode: Mode = TrafficMode.DRAIN,
    timeout: Timeout = 60.0,
    on_timeout: Late = OnTimeout.CANCEL_SWAP,
    loading: LoadMode = LoadingMode.AUTO,
    verify: Verify = VerifyMode.STANDARD,
    keep_previous: Annotated[bool, typer.Option(help="Keep the old tensors for rollback.")] = True,
    adapter: Adapters = None,
    on_incompatible: Incompatible = OnIncompatible.BLOCK,
    check_prompt: Annotated[
        list[str] | None, typer.Option(help="Try the version with this before it can answer anybody (repeatable).")
    ] = None,
    max_logprob_delta: Annotated[
        float | None, typer.Option(min=0, help="Largest change of the mean log-probability of an answer to these.")
    ] = None,
    wait: Wait = True,
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Make the engine serve another version."""
    target = VersionRef(version=version, uri=_uri(source), digest=digest, credentials=credentials)
    adapters = _adapters(adapter, base_digest=digest, on_incompatible=on_incompatible)
    prompts = [PromptCheck(prompt=text, max_logprob_delta=max_logprob_delta) for text in check_prompt or []]
    checks = Checks(prompts=prompts)

    def decide(fence: Fence) -> SwapRequest:
        return SwapRequest(
            operation_id=_operation_id(f"{target.uri} {version} {digest} {fence.revision}"),
            fence=fence,
            target=target,
            traffic=Traffic(mode=mode, timeout_seconds=timeout, on_timeout=on_timeout),
            loading=Loading(mode=loading, verify=verify, keep_previous=keep_previous),
            adapters=adapters,
            checks=checks,
        )

    _operate(_client(url, token_file), "/swaps", decide, wait=wait, output=output)


def rollback(
    mode: Mode = TrafficMode.DRAIN,
    timeout: Timeout = 60.0,
    on_timeout: Late = OnTimeout.CANCEL_SWAP,
    on_incompatible: Incompatible = OnIncompatible.BLOCK,
    wait: Wait = True,
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Put the retained previous version back."""

    def decide(fence: Fence) -> RollbackRequest:
        return RollbackRequest(
            operation_id=_operation_id(f"rollback {fence.revision}"),
            fence=fence,
            traffic=Traffic(mode=mode, timeout_seconds=timeout, on_timeout=on_timeout),
            adapters=AdapterChange(on_incompatible=on_incompatible),
        )

    _operate(_client(url, token_file), "/rollback", decide, wait=wait, output=output)


def cancel(
    operation_id: Annotated[str, typer.Argument(help="Id of the operation; the running one when left out.")] = "",
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Cancel an operation while the old version has not been left."""
    from modelswap_engine.cli import render
    from modelswap_engine.cli.client import quoted

    client = _client(url, token_file)
    now = client.get("/state", EngineState)
    if not operation_id:
        if now.operation is None or now.operation.state.terminal:
            raise NotFound("no operation is running", advice="`modelswap state` shows the last one")
        operation_id = now.operation.operation_id
    fence, _ = _fence(now)
    answer = client.post(f"/swaps/{quoted(operation_id)}/cancel", CancelRequest(fence=fence), SwapStatus)
    _show(answer, output, render.outcome)


def check(
    pattern: Annotated[str, typer.Argument(help="Names of tensors to check (glob).")] = "*",
    still: Annotated[
        bool, typer.Option(help="Hold new requests meanwhile: some engines show all of their weights only then.")
    ] = False,
    timeout_seconds: Annotated[
        float, typer.Option(min=0, max=LONGEST_DRAIN_SECONDS, help="With --still: how long to wait for those inside.")
    ] = 60.0,
    action: Annotated[
        CheckAction, typer.Option(help="Snapshot and Compare need an engine with --debug-checks.")
    ] = CheckAction.VERIFY,
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Re-hash the live tensors against the live version's manifest, or a snapshot; exit code 1 when they differ."""
    from modelswap_engine.cli import render

    request = CheckRequest(pattern=pattern, action=action, still=still, timeout_seconds=timeout_seconds)
    found = _client(url, token_file).post("/check", request, CheckResult)
    _show(found, output, render.check)
    if not found.ok:
        raise typer.Exit(1)


def release(url: Url = _URL, token_file: TokenFile = None, output: Format = Output.TEXT) -> None:
    """Give up the retained previous version, and the memory it takes."""
    from modelswap_engine.cli import render

    client = _client(url, token_file)
    fence, _ = _fence(client.get("/state", EngineState))
    _show(client.post("/release", ReleaseRequest(fence=fence), EngineState), output, render.state)


def pause(
    seconds: Annotated[float, typer.Option(help="The pause ends by itself after so many seconds.")] = 30.0,
    lease_id: Annotated[str, typer.Option(help="The same id again moves the deadline.")] = "cli",
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Hold new requests at the gate."""
    from modelswap_engine.cli import render

    request = PauseRequest(lease_id=lease_id, owner="cli", seconds=seconds)
    _show(_client(url, token_file).post("/pause", request, EngineState), output, render.state)


def resume(
    lease_id: Annotated[str, typer.Option(help="The id that was used to pause.")] = "cli",
    owner: Annotated[str, typer.Option(help="Who holds the lease, as the state names it.")] = "cli",
    url: Url = _URL,
    token_file: TokenFile = None,
    output: Format = Output.TEXT,
) -> None:
    """Let requests in again."""
    from modelswap_engine.cli import render

    answer = _client(url, token_file).post("/resume", ResumeRequest(lease_id=lease_id, owner=owner), EngineState)
    _show(answer, output, render.state)


def _client(url: str, token_file: Path | None) -> "ControlClient":
    from modelswap_engine.cli.client import connect

    return connect(url, token_file)


def _uri(source: str) -> str:
    """Accept a plain path where a file is meant."""
    return source if ":" in source.split("/", 1)[0] else Path(source).resolve().as_uri()


def _adapters(given: list[str] | None, *, base_digest: str, on_incompatible: OnIncompatible) -> AdapterChange:
    """Read ``NAME=SOURCE``; contents that come with a pinned version are bound to it."""
    sources = []
    for item in given or []:
        name, equals, source = item.partition("=")
        if not equals or not name or not source:
            raise BadRequest(f"--adapter {item!r} is not NAME=SOURCE", advice="write e.g. --adapter de=/adapters/de")
        sources.append(AdapterSource(name=name, uri=_uri(source), base_digest=base_digest))
    return AdapterChange(on_incompatible=on_incompatible, sources=sources)


def _accepted(
    client: "ControlClient", path: str, decide: "Callable[[Fence], SwapRequest | RollbackRequest]"
) -> SwapStatus:
    """Decide on the state as it is, and again when it moved meanwhile (an audit ended, a lease ran out)."""
    for _ in range(ATTEMPTS):
        fence, etag = _fence(client.get("/state", EngineState))
        with contextlib.suppress(StateMoved):
            return client.post(path, decide(fence), SwapStatus, if_match=etag)
    raise StateMoved("the engine's state keeps moving", advice="look at `modelswap state` and try again")


def _fence(state: EngineState) -> tuple[Fence, str]:
    """Return the next decision after the state, and the state it is made on."""
    fence = Fence(pod_uid=state.pod_uid, owner_uid="cli", epoch=state.epoch, revision=state.revision + 1)
    return fence, f'"{state.boot_id}.{state.seq}"'


def _operation_id(decision: str) -> str:
    digest = hashlib.sha256(decision.encode()).hexdigest()
    return f"cli-{digest[:12]}-{secrets.token_hex(4)}"


def _show(message: object, output: Output, text: "Callable[[Any], RenderableType]") -> None:
    from modelswap_engine.cli.client import pretty

    if output is Output.JSON:
        typer.echo(pretty(message))
        return
    from modelswap_engine.cli.render import out

    out(text(message))


def _operate(
    client: "ControlClient",
    path: str,
    decide: "Callable[[Fence], SwapRequest | RollbackRequest]",
    *,
    wait: bool,
    output: Output,
) -> None:
    """Start an operation and follow it to its end; exit code 1 unless it succeeded."""
    from modelswap_engine.cli import render
    from modelswap_engine.cli.follow import follow

    status = _accepted(client, path, decide)
    if wait:
        status = follow(client, status, quiet=output is Output.JSON)
    _show(status, output, render.outcome)
    if wait and not status.state.succeeded:
        raise typer.Exit(1)
