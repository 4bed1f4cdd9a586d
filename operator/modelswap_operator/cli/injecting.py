"""``kubectl modelswap inject``: prints a Deployment or StatefulSet as a slot has it, and applies nothing."""

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
import yaml

from modelswap_operator.cli import views
from modelswap_operator.cli.engine_commands import EngineCommand, engine_of, read
from modelswap_operator.cli.failures import PluginError, UsageError
from modelswap_operator.cli.injection import (
    EMBEDDED,
    KINDS,
    Object,
    Wanted,
    container_of,
    engine_in,
    injected,
    slot_in,
    title,
)
from modelswap_operator.cli.options import text_of
from modelswap_operator.cli.splicing import spliced

_SLOT: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_SIZE: Final = re.compile(r"(\d+)([kMGT]|[KMGT]i)?")
_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


class Engine(StrEnum):
    """What runs the model."""

    VLLM = "vllm"
    SGLANG = "sglang"
    EMBEDDED = "embedded"


class Form(StrEnum):
    """How the object is printed."""

    YAML = "yaml"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inject)


def inject(
    file: Annotated[Path, typer.Option("-f", "--filename", help="File with the workload; - reads it.")],
    engine: Annotated[Engine | None, typer.Option(help="Else what the container's command shows.")] = None,
    slot: Annotated[str, typer.Option(help="Name of the slot and its ModelVersion; else the workload's.")] = "",
    container: Annotated[str, typer.Option(help="The engine's container, where there are several.")] = "",
    model: Annotated[str, typer.Option(help="Folder of the first version; else what the command names.")] = "",
    version: Annotated[str, typer.Option("--version", help="Label of the first version.")] = "",
    served_model_name: Annotated[str, typer.Option(help="What clients ask for; else the command's, or the slot.")] = "",
    checkpoints: Annotated[str, typer.Option(help="Room for three of the largest checkpoint, such as 60Gi.")] = "",
    image: Annotated[str, typer.Option(help="Image of modelswap; else the chart's of this release.")] = "",
    operator: Annotated[str, typer.Option(help="NAMESPACE:ACCOUNT of the operator.")] = "modelswap-system:modelswap",
    control_tls_secret: Annotated[
        str, typer.Option(help="With tls.crt and tls.key: the control port speaks TLS.")
    ] = "",
    drain_seconds: Annotated[int, typer.Option(min=1, max=86400, help="Longer than the longest answer takes.")] = 60,
    experimental: Annotated[bool, typer.Option("--experimental", help="Needed for vllm and sglang.")] = False,
    output: Annotated[Form, typer.Option("-o", "--output", help="yaml or json.")] = Form.YAML,
) -> None:
    """Print a Deployment or StatefulSet with the sidecar in its pods, as the engine chart renders them.

    Nothing is applied, and no cluster is asked. Where the sidecar is there already, nothing changes.
    """
    text = text_of(file)
    documents = _documents(text, file)
    place = _workload(documents, file)
    workload = documents[place]
    if not _already(workload, slot, engine):
        given = Given(engine, slot, container, model, served_model_name, checkpoints, experimental)
        wanted = _wanted(workload, given, version=version, image=image, operator=operator, drain=drain_seconds)
        wanted = replace(wanted, tls=control_tls_secret)
        shape = {name: value for name, value in _shape(wanted.engine, tls=bool(wanted.tls)).items() if name != "image"}
        documents[place] = injected(workload, container=container, wanted=wanted, shape=shape)
        _say(workload, container, wanted)
    if output is Form.JSON:
        things = [thing for thing in documents if thing is not None]
        many = {"apiVersion": "v1", "kind": "List", "items": things}
        views.data(things[0] if len(things) == 1 else many, views.Output.JSON)
    else:
        typer.echo(spliced(text, place, documents[place]), nl=False)


class Given(NamedTuple):
    """What the user said; "" and None where nothing."""

    engine: Engine | None
    slot: str
    container: str
    model: str
    served: str
    checkpoints: str
    experimental: bool


def _documents(text: str, file: Path) -> list[Any]:
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise PluginError(f"{file}: not YAML: {str(error).splitlines()[0]}") from None


def _workload(documents: Sequence[Any], file: Path) -> int:
    """Return which of the documents is the workload."""
    kinds = [thing.get("kind", "nothing") if isinstance(thing, dict) else "nothing" for thing in documents]
    found = [index for index, kind in enumerate(kinds) if kind in KINDS]
    if len(found) != 1:
        raise PluginError(
            f"{file} has {len(found)} Deployments and StatefulSets (it has: {', '.join(map(str, kinds)) or 'nothing'})",
            advice="give a file with one; pods of other kinds are not of a slot",
        )
    try:
        container_of(documents[found[0]], documents[found[0]]["spec"]["template"]["spec"]["containers"][0]["name"])
    except (KeyError, IndexError, TypeError):
        raise PluginError(f"{file}: its {kinds[found[0]]} has no container", advice="is it whole?") from None
    return found[0]


def _already(workload: Object, slot: str, engine: Engine | None) -> bool:
    """Say whether the sidecar is there; refuse where it is another one than is asked for."""
    found = slot_in(workload)
    if not found:
        return False
    if slot not in ("", found) or engine not in (None, engine_in(workload)):
        raise PluginError(
            f"{title(workload)} has pods of slot {found} already, with {engine_in(workload)}",
            advice="start from the file without the sidecar",
        )
    typer.echo(f"# {title(workload)} has pods of slot {found} already: nothing changed", err=True)
    return True


def _wanted(workload: Object, given: Given, *, version: str, image: str, operator: str, drain: int) -> Wanted:
    """Bring together what the user said and what the command of the container says."""
    where = title(workload)
    slot = given.slot or str(workload["metadata"].get("name", ""))
    if not _SLOT.fullmatch(slot):
        raise UsageError(f"{slot!r} cannot be the name of a slot", advice="--slot takes the name of an object")
    engine, command = _command(workload, given)
    if engine != EMBEDDED and not given.experimental:
        raise UsageError(
            f"{engine} is experimental", advice="read docs/backends.md, and say --experimental to have it all the same"
        )
    model = given.model or command.model
    if not model.startswith("/"):
        said = (
            f"the command names the model {model}, which is no folder" if model else "the model's folder is not known"
        )
        raise UsageError(f"{where}: {said}", advice="name the folder of the first version with --model /…")
    if given.served and command.served not in ("", given.served):
        raise UsageError(f"{where}: the command serves {command.served}", advice="leave out --served-model-name")
    served = given.served or command.served or slot
    named = () if command.served or engine == EMBEDDED else (f"--served-model-name={served}",)
    return Wanted(
        engine=engine,
        slot=slot,
        served=served,
        model=model,
        version=version,
        image=image or str(_shape(engine)["image"]),
        operator=operator,
        python=command.python,
        drain=drain,
        checkpoints=_bytes(given.checkpoints) if engine != EMBEDDED else 0,
        words=(*command.words, *named),
    )


def _command(workload: Object, given: Given) -> tuple[str, EngineCommand]:
    """Return the engine, and what the command of its container says; nothing of one that is replaced."""
    found = container_of(workload, given.container)
    words = [*map(str, found.get("command") or []), *map(str, found.get("args") or [])]
    engine = str(given.engine or engine_of(words))
    where = f"{title(workload)}, container {found['name']}"
    if engine == EMBEDDED:
        return engine, EngineCommand(words=(), python="", model="", served="")
    if engine and found.get("command"):
        return engine, read(words, engine, where=where)
    missing = "it has no command, and what its image starts cannot be known" if not found.get("command") else ""
    raise PluginError(
        f"{where}: {missing or 'its command shows neither vllm nor sglang'}",
        advice="write the command of the image out, such as [vllm, serve]" if missing else "say --engine",
    )


def _bytes(size: str) -> int:
    found = _SIZE.fullmatch(size)
    if found is None:
        raise UsageError(
            f"--checkpoints {size}: a whole number with a unit is needed" if size else "--checkpoints is needed",
            advice="three times the largest checkpoint, such as --checkpoints 60Gi",
        )
    return int(found[1]) * _UNITS[found[2] or ""]


def _shape(engine: str, *, tls: bool = False) -> Object:
    """Return the chart's pod for an engine, with marks."""
    text = resources.files(__package__).joinpath("pods.yaml").read_text(encoding="utf-8")
    found: Object = yaml.safe_load(text)[f"{engine}-tls" if tls else engine]
    return found


def _say(workload: Object, container: str, wanted: Wanted) -> None:
    """Say what else changes for whoever uses the pods; not on standard output, which is the object's."""
    engine = container_of(workload, container)
    ports = sorted({int(port["containerPort"]) for port in engine.get("ports") or []} - {8000})
    if ports:
        typer.echo(f"# port {', '.join(map(str, ports))} is gone: let Services lead to 8000, named http", err=True)
    if wanted.engine == EMBEDDED:
        typer.echo(f"# container {engine['name']} runs {wanted.image} now; its command and options are gone", err=True)
    if wanted.tls:
        need = "for modelswap-control.NAMESPACE.svc, by an authority in the operator's controlTls.ca"
        typer.echo(f"# Secret {wanted.tls} has to be there with tls.crt and tls.key, {need}", err=True)
    typer.echo(f"# clients ask for {wanted.served}; ship versions by a ModelVersion named {wanted.slot}", err=True)
