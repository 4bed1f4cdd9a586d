"""``kubectl modelswap doctor|support-bundle``: collects what there is to see; finds the cause, or packs it up."""

import io
import json
import os
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer

from modelswap_engine.cli.groups import grouped
from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import ModelswapError
from modelswap_operator.api.labels import SLOT_LABEL, assignment_name
from modelswap_operator.cli import views
from modelswap_operator.cli.engines import PROVED_BY_FORWARD, Engines, assignment_text, control_port
from modelswap_operator.cli.failures import ClusterError, PluginError
from modelswap_operator.cli.findings import Facts, Level, findings
from modelswap_operator.cli.kubectl import Kubectl
from modelswap_operator.cli.looking import LORAADAPTER
from modelswap_operator.cli.options import (
    MODELVERSION,
    Format,
    Name,
    Where,
    slot_named,
)
from modelswap_operator.cli.slots import Slot, adapters_of, pods_of
from modelswap_operator.cli.views import Output

T = TypeVar("T")

OPERATOR_LABELS: Final = "app.kubernetes.io/part-of=modelswap,app.kubernetes.io/component=operator"
LOG_LINES: Final = 2000
_READYZ_SECONDS: Final = 5.0
_STYLES: Final = {Level.PROBLEM: "red", Level.NOTE: "yellow", Level.UNKNOWN: "dim", Level.GOOD: "green"}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(grouped(doctor))
    app.command("support-bundle")(grouped(support_bundle))


def doctor(
    *,
    name: Name,
    where: Where,
    output: Format = Output.TEXT,
) -> None:
    """Find out why a slot is not Ready: cause and next step, worst first; exit code 1 when there is a problem."""
    kubectl, slot = slot_named(name, where)
    found = findings(collect(kubectl, slot))
    if output is not Output.TEXT:
        views.data([{"level": f.level.value, "text": f.text, "next": f.next} for f in found], output)
    else:
        console = views.console()
        for finding in found:
            console.print(f"[{_STYLES[finding.level]}]{finding.level.value:8}[/]", end="")
            console.print(finding.text, markup=False)
            if finding.next:
                console.print(f"         next: {finding.next}", markup=False)
    if any(finding.level is Level.PROBLEM for finding in found):
        raise typer.Exit(1)


def collect(kubectl: Kubectl, slot: Slot) -> Facts:
    """Look at everything that may be looked at with the user's rights."""
    unseen: list[str] = []
    none: list[dict[str, Any]] = []
    seen = _or(unseen, none, lambda: kubectl.items("pods", selector=_selector(slot), namespace=slot.namespace))
    pods = pods_of(seen, slot.name)
    adapters = _or(unseen, none, lambda: kubectl.items(LORAADAPTER, namespace=slot.namespace))
    text = _or(unseen, "", lambda: assignment_text(kubectl, slot.namespace, assignment_name(slot.name)))
    everywhere = Kubectl(context=kubectl.context, kubeconfig=kubectl.kubeconfig, everywhere=True)
    operators: list[dict[str, Any]] | None
    try:
        operators = everywhere.items("pods", selector=OPERATOR_LABELS)
    except ClusterError as error:
        operators = None
        unseen.append(f"the operator's pods: {error.message}")
    not_ready = [pod for pod in pods if not _ready(pod) and _running(pod) and control_port(pod) is not None]
    readiness = {pod["metadata"]["name"]: _readyz(kubectl, pod) for pod in not_ready[:3]}
    return Facts(
        slot=slot,
        pods=pods,
        adapters=adapters_of(adapters, {"namespace": slot.namespace, "name": slot.name}),
        operators=operators,
        assignment=_assignment(text, unseen),
        readiness={name: said for name, said in readiness.items() if said},
        unseen=unseen,
    )


def _or(unseen: list[str], nothing: T, look: Callable[[], T]) -> T:
    try:
        return look()
    except ClusterError as error:
        unseen.append(error.message)
        return nothing


def _selector(slot: Slot) -> str:
    return f"{SLOT_LABEL}={slot.name}"


def _assignment(text: str, unseen: list[str]) -> Assignment | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Assignment)
    except msgspec.DecodeError as error:
        unseen.append(f"the assignment cannot be read: {error}")
        return None


def _readyz(kubectl: Kubectl, pod: dict[str, Any]) -> str:
    """Ask a pod why it is not ready, which takes no token."""
    port = control_port(pod)
    if port is None:
        return ""
    try:
        with kubectl.forward(pod["metadata"]["name"], port.number, tls=port.tls) as url:
            try:
                with urllib.request.urlopen(  # noqa: S310  # loopback
                    f"{url}/readyz", timeout=_READYZ_SECONDS, context=PROVED_BY_FORWARD.context()
                ) as answer:
                    return str(answer.read(2000), "utf-8", "replace").strip()
            except urllib.error.HTTPError as error:
                return error.read(2000).decode("utf-8", "replace").strip()
    except (ClusterError, OSError):
        return ""


def _ready(pod: dict[str, Any]) -> bool:
    return any(
        c.get("type") == "Ready" and c.get("status") == "True" for c in pod.get("status", {}).get("conditions", [])
    )


def _running(pod: dict[str, Any]) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Running")


def support_bundle(
    *,
    name: Name,
    file: Annotated[Path | None, typer.Option("-f", "--filename", help="Where to write it.")] = None,
    where: Where,
) -> None:
    """Write one archive with all that is to be seen of a slot: objects, events, states, logs. No Secrets, no tokens."""
    kubectl, slot = slot_named(name, where)
    path = file or Path(f"modelswap-{slot.namespace}-{name}.tar.gz")
    unseen: list[str] = []
    parts: dict[str, str] = {}
    for part, look in _looks(kubectl, slot).items():
        typer.echo(f"{part} …", err=True)
        try:
            parts[part] = look()
        except (ClusterError, PluginError) as error:
            unseen.append(f"{part}: {error.message}")
        except ModelswapError as error:
            unseen.append(f"{part}: {error.code}: {error.message}")
    parts["unseen.txt"] = "\n".join(unseen) + "\n" if unseen else "everything could be looked at\n"
    try:
        write_archive(path, parts, folder=f"modelswap-{name}", at=int(time.time()))
    except OSError as error:
        raise PluginError(f"{path}: {error.strerror}") from None
    typer.echo(f"{path}: {len(parts)} files, {path.stat().st_size} bytes; look through it before you send it on")


def _looks(kubectl: Kubectl, slot: Slot) -> dict[str, Callable[[], str]]:
    """Return what goes into a bundle, by file name."""
    place = slot.namespace
    engines = Engines(kubectl=kubectl, namespace=place, slot=slot.name)
    none: list[dict[str, Any]] = []
    pods = _or([], none, engines.pods)  # that they may not be listed is said where pods.yaml fails

    def yaml(kind: str, *choice: str, at: str = place) -> Callable[[], str]:
        return lambda: kubectl.run("get", kind, *choice, "-o", "yaml", namespace=at)

    looks: dict[str, Callable[[], str]] = {
        "version.txt": lambda: kubectl.run("version"),
        "findings.json": lambda: json.dumps([vars(f) for f in findings(collect(kubectl, slot))], indent=1),
        "modelversion.yaml": yaml(MODELVERSION, slot.name),
        "loraadapters.yaml": yaml(LORAADAPTER),
        "assignment.yaml": yaml("configmap", assignment_name(slot.name)),
        "pods.yaml": yaml("pods", f"--selector={_selector(slot)}"),
        "events.yaml": yaml("events"),
        "operators.log": lambda: kubectl.run(
            "logs",
            f"--selector={OPERATOR_LABELS}",
            f"--tail={LOG_LINES}",
            "--prefix",
            namespace=_operator_place(kubectl),
        ),
    }
    for pod in pods:
        name = pod["metadata"]["name"]
        looks[f"pods/{name}.log"] = lambda name=name: kubectl.run(  # type: ignore[misc]  # bound now
            "logs", name, "--all-containers", "--prefix", f"--tail={LOG_LINES}", namespace=place
        )
        looks[f"pods/{name}.state.json"] = lambda pod=pod: _state(engines, pod)  # type: ignore[misc]
    return looks


def _operator_place(kubectl: Kubectl) -> str:
    everywhere = Kubectl(context=kubectl.context, kubeconfig=kubectl.kubeconfig, everywhere=True)
    found = everywhere.items("pods", selector=OPERATOR_LABELS)
    if not found:
        raise PluginError("no operator's pod was found")
    return str(found[0]["metadata"]["namespace"])


def _state(engines: Engines, pod: dict[str, Any]) -> str:
    with engines.reach(pod) as client:
        return json.dumps(msgspec.to_builtins(client.get("/state", EngineState)), indent=1)


def write_archive(path: Path, parts: dict[str, str], *, folder: str, at: int) -> None:
    """Write files into a tar.gz that nobody else can read, whatever was there under its name."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in parts.items():
            content = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), at, 0o600
            archive.addfile(entry, io.BytesIO(content))
    Path(draft).replace(path)
