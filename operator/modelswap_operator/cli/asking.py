"""``kubectl modelswap plan|check|adapters``: what the engines themselves say, asked through their control ports."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from modelswap_engine.cli import render
from modelswap_engine.cli.groups import grouped
from modelswap_engine.protocol.adapters import AdapterRegistry
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_engine.protocol.messages import CheckRequest, CheckResult, Plan, VersionRef
from modelswap_operator.api.estimates import Estimate, staging
from modelswap_operator.api.labels import MODELVERSION_KIND
from modelswap_operator.api.modelversion import ModelVersionStatus
from modelswap_operator.cli import views
from modelswap_operator.cli.engines import Engines
from modelswap_operator.cli.failures import PluginError
from modelswap_operator.cli.kubectl import Kubectl
from modelswap_operator.cli.options import (
    Format,
    Name,
    Where,
    cluster,
    slot_named,
    text_of,
)
from modelswap_operator.cli.slots import Slot, slot_of
from modelswap_operator.cli.views import Output

STRANGERS: Final = 5
"""How many pods are asked whose versions nobody has told."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (plan, check, adapters):
        app.command()(grouped(command))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a change would do to the pods that serve one version now."""

    slot: str
    live: VersionRef
    pods: int
    plan: Plan
    expected: Estimate | None = None


def plan(
    *,
    file: Annotated[Path, typer.Option("-f", "--filename", help="File with the new ModelVersion; - reads it.")],
    where: Where,
    output: Format = Output.TEXT,
) -> None:
    """Show what applying a file would do, from each version that is served now, without doing it.

    Exit code 1 when some pod would refuse it.
    """
    kubectl = cluster(where)
    slots = [slot_of(thing) for thing in _checked(kubectl, file)]
    if not slots:
        raise PluginError(f"{file} has no {MODELVERSION_KIND}")
    found = [planned for slot in slots for planned in _planned(kubectl, slot)]
    if output is Output.TEXT:
        views.show(Group(*(line for one in found for line in _shown(one))))
    else:
        views.data([_plain(one) for one in found], output)
    if any(one.plan.refusals for one in found):
        raise typer.Exit(1)


def _checked(kubectl: Kubectl, file: Path) -> list[dict[str, Any]]:
    """Return the ModelVersions of a file as the API server would have them, which refuses what breaks a rule."""
    answer = json.loads(kubectl.run("apply", "--dry-run=server", "-f", "-", "-o", "json", stdin=text_of(file)))
    things = answer["items"] if answer["kind"] == "List" else [answer]
    return [thing for thing in things if thing["kind"] == MODELVERSION_KIND]


def _planned(kubectl: Kubectl, slot: Slot) -> Iterator[Planned]:
    """Ask one pod of each version that is served now."""
    engines = Engines(kubectl=kubectl, namespace=slot.namespace, slot=slot.name)
    pods = engines.pods()
    if not pods:
        raise PluginError(
            f"slot {slot.name} has no pods in namespace {slot.namespace}",
            advice=f"kubectl modelswap doctor {slot.name}",
        )
    request = slot.spec.plan_request()
    asked: set[str] = set()
    for pod, count in one_of_each(pods, slot.status):
        typer.echo(f"asking {pod['metadata']['name']} …", err=True)
        with engines.reach(pod) as client:
            live = client.get("/state", EngineState).live or VersionRef()
            if live.digest in asked:
                continue
            asked.add(live.digest)
            found = client.post("/plan", request, Plan)
            known = slot.status.history
            expected = staging(known, digest=found.to_digest, bytes_to_fetch=found.bytes_to_fetch)
            yield Planned(slot=slot.name, live=live, pods=count, plan=found, expected=expected)


def one_of_each(pods: Sequence[dict[str, Any]], status: ModelVersionStatus) -> list[tuple[dict[str, Any], int]]:
    """Return a pod for each version that is served, with how many serve it, as the operator saw last.

    Pods that it says nothing of (there is no object yet, or it lists others) are asked one by one, a few of them.
    """
    named = {pod.name: pod.digest for pod in status.pods if pod.digest}
    counts = {version.digest: version.pods for version in status.versions}
    found: dict[str, tuple[dict[str, Any], int]] = {}
    for pod in pods:
        digest = named.get(pod["metadata"]["name"], "")
        if digest:
            found.setdefault(digest, (pod, counts.get(digest, 1)))
    return list(found.values()) or [(pod, 1) for pod in pods[:STRANGERS]]


def _shown(one: Planned) -> Iterator[Any]:
    pods = "1 pod" if one.pods == 1 else f"{one.pods} pods"
    yield Text(f"{one.slot}: {pods} from {one.live.version or 'no version'} ({views.short(one.live.digest)})", "bold")
    yield render.plan(one.plan)
    if one.expected is not None:
        yield Text(f"staging takes one pod about {one.expected.seconds} s: {one.expected.basis}")


def _plain(one: Planned) -> dict[str, Any]:
    return {
        "slot": one.slot,
        "from": msgspec.to_builtins(one.live),
        "pods": one.pods,
        "plan": msgspec.to_builtins(one.plan),
        **({"expected": one.expected._asdict()} if one.expected is not None else {}),
    }


def check(
    *,
    name: Name,
    pattern: Annotated[str, typer.Argument(help="Glob over tensor names.")] = "*",
    where: Where,
    output: Format = Output.TEXT,
) -> None:
    """Hash the live tensors of every pod again, beside serving, and compare them with the version's manifest.

    Exit code 1 when a pod holds other bytes, or could not be asked.
    """
    kubectl, slot = slot_named(name, where)
    engines = Engines(kubectl=kubectl, namespace=slot.namespace, slot=name)
    results: dict[str, CheckResult | str] = {}
    for pod in engines.pods():
        podname = pod["metadata"]["name"]
        typer.echo(f"hashing in {podname} …", err=True)
        results[podname] = _asked(engines, pod, pattern)
    if not results:
        raise PluginError(f"slot {name} has no pods", advice=f"kubectl modelswap doctor {name}")
    if output is Output.TEXT:
        columns = ("pod", "digest", "tensors", "bytes", "result")
        views.show(views.rows(columns, (_row(pod, result) for pod, result in results.items())))
    else:
        views.data({pod: _builtins(result) for pod, result in results.items()}, output)
    if any(isinstance(result, str) or not result.ok for result in results.values()):
        raise typer.Exit(1)


def _asked(engines: Engines, pod: dict[str, Any], pattern: str) -> CheckResult | str:
    try:
        with engines.reach(pod) as client:
            return client.post("/check", CheckRequest(pattern=pattern), CheckResult)
    except ModelswapError as error:
        return f"{error.code}: {error.message}"


def _row(pod: str, result: CheckResult | str) -> tuple[str, str, str, str, str]:
    if isinstance(result, str):
        return pod, "-", "-", "-", result
    wrong = ", ".join(item.name for item in result.mismatched[:3])
    more = f" and {len(result.mismatched) - 3} more" if len(result.mismatched) > 3 else ""
    verdict = "ok" if result.ok else f"MISMATCH: {wrong}{more}" if wrong else "MISMATCH: ranks disagree"
    if result.ok and result.unverifiable:
        verdict = f"ok as far as it could be seen ({len(result.unverifiable)} could not)"
    return pod, views.short(result.digest), str(result.checked), render.size(result.bytes), verdict


def _builtins(result: CheckResult | AdapterRegistry | str) -> Any:
    return {"error": result} if isinstance(result, str) else msgspec.to_builtins(result)


def adapters(
    *,
    name: Name,
    where: Where,
    output: Format = Output.TEXT,
) -> None:
    """Show the adapters that each pod of a slot has, as the pods say themselves."""
    kubectl, slot = slot_named(name, where)
    engines = Engines(kubectl=kubectl, namespace=slot.namespace, slot=name)
    found = {pod["metadata"]["name"]: _adapters_of(engines, pod) for pod in engines.pods()}
    if output is not Output.TEXT:
        views.data({pod: _builtins(said) for pod, said in found.items()}, output)
    else:
        views.show(Group(*(part for pod, said in found.items() for part in (Text(pod, "bold"), _registry(said)))))
    if any(isinstance(said, str) for said in found.values()):
        raise typer.Exit(1)


def _adapters_of(engines: Engines, pod: dict[str, Any]) -> AdapterRegistry | str:
    try:
        with engines.reach(pod) as client:
            return client.get("/adapters", AdapterRegistry)
    except ModelswapError as error:
        return f"{error.code}: {error.message}"


def _registry(said: AdapterRegistry | str) -> RenderableType:
    return Text(said, "red") if isinstance(said, str) else render.adapters(said)
