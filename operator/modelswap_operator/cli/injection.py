"""A workload with modelswap's part of the pod put into it. Pure.

What is put in is what the engine chart renders (``pods.yaml``, generated from it). What the object says itself stays,
except where the chart's pod cannot do without: the command, probes and ports of the engine's container. What would have
to be guessed is refused.
"""

import copy
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from modelswap_operator.api.labels import SLOT_LABEL, assignment_name
from modelswap_operator.cli.failures import PluginError

Object = dict[str, Any]

KINDS: Final = ("Deployment", "StatefulSet")
EMBEDDED: Final = "embedded"
PORTS: Final = frozenset({8000, 8001, 8100})
SIDECAR: Final = "modelswap"
_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
_THE_CHARTS: Final = ("image", "imagePullPolicy", "command", "args")
_PROBES_AND_PORTS: Final = ("ports", "startupProbe", "readinessProbe", "livenessProbe")
_USERS_OWN_PATHS: Final = ("/tmp", "/dev/shm")  # noqa: S108 - paths in a container, where the user's volume does as well
_MARK: Final = re.compile(r"<(\w+)(?:\+(\d+))?>")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the marks of a pod stand for; "" leaves out the options that need it.

    ``words`` is the engine's command, ``tls`` the Secret with the control port's certificate, "" for plain HTTP.
    """

    engine: str
    slot: str
    served: str
    model: str
    version: str
    image: str
    operator: str
    python: str
    drain: int
    checkpoints: int
    words: tuple[str, ...] = ()
    tls: str = ""


def slot_in(workload: Object) -> str:
    """Return the slot that a workload's pods are already made for, "" when they are not."""
    found = _spec(workload).get("volumes") or []
    names = [str((volume.get("configMap") or {}).get("name", "")) for volume in found if volume["name"] == "assignment"]
    return next((name.removeprefix(assignment_name("")) for name in names if name), "")


def engine_in(workload: Object) -> str:
    """Return which engine the sidecar in a workload drives."""
    arguments = (str(word) for one in _spec(workload).get("initContainers") or [] for word in one.get("args") or [])
    return next((word.partition("=")[2] for word in arguments if word.startswith("--backend=")), EMBEDDED)


def container_of(workload: Object, name: str) -> Object:
    """Return the engine's container.

    Raises:
        PluginError: there are several and none is named, or none has the name.
    """
    containers: list[Object] = _spec(workload)["containers"]
    named = ", ".join(str(one["name"]) for one in containers)
    found = [one for one in containers if name in ("", one["name"])]
    if len(found) == 1:
        return found[0]
    problem = f"no container is called {name}" if name else f"it has {len(containers)} containers"
    raise PluginError(f"{title(workload)}: {problem}", advice=f"name the engine's with --container: {named}")


def title(workload: Object) -> str:
    """Name a workload in a message."""
    return f"{workload['kind'].lower()} {workload['metadata'].get('name', 'without a name')}"


def injected(workload: Object, *, container: str, wanted: Wanted, shape: Object) -> Object:
    """Return a workload whose pods are pods of a slot.

    Raises:
        PluginError: it says something that the pod of a slot cannot have.
    """
    made = copy.deepcopy(workload)
    engine = container_of(made, container)
    covering = _covering(engine, wanted.model)
    refuse(made, engine, external=wanted.engine != EMBEDDED, model_mounted=covering is not None, model=wanted.model)
    pod = filled(shape, wanted, root=str(covering["mountPath"]) if covering else "")
    _into_container(engine, pod.pop("engine"), wanted, where=title(made))
    for one in pod.get("initContainers", []):
        if one["name"] == SIDECAR and covering is not None:
            one["volumeMounts"].append({**covering, "readOnly": True})
    used = {mount["name"] for one in [*pod.get("initContainers", []), engine] for mount in one["volumeMounts"]}
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] in used]
    _into_spec(made, pod)
    _labelled(made, wanted.slot, engine["name"])
    return made


def refuse(workload: Object, engine: Object, *, external: bool, model: str, model_mounted: bool) -> None:
    """Refuse what would break in the pod of a slot, or break it.

    Raises:
        PluginError: with the first of them.
    """
    spec, where = _spec(workload), title(workload)
    if spec.get("hostNetwork"):
        raise PluginError(
            f"{where}: hostNetwork: ports 8000 and 8001 would be the node's, and so would the engine's on 127.0.0.1, "
            "which no key guards",
            advice="take hostNetwork out",
        )
    if "preStop" in (engine.get("lifecycle") or {}):
        raise PluginError(
            f"{where}: container {engine['name']} has a preStop hook, and the engine's has to drain requests",
            advice="take it out: requests are let finish before the container is told to end",
        )
    others = [one for one in [*(spec.get("initContainers") or []), *spec["containers"]] if one is not engine]
    for one in others:
        taken = {port.get("containerPort") for port in one.get("ports") or []} & PORTS
        if taken:
            raise PluginError(
                f"{where}: container {one['name']} has port {min(taken)}, which the sidecar or the engine needs",
                advice="give it another port: 8000, 8001 and 8100 are taken",
            )
    inner, outer = engine.get("securityContext") or {}, spec.get("securityContext") or {}
    if external and {"runAsUser", "runAsGroup"} & inner.keys():
        raise PluginError(
            f"{where}: container {engine['name']} runs as a user of its own, and engine and sidecar must be one user",
            advice="move runAsUser and runAsGroup to the pod's securityContext",
        )
    if 0 in (inner.get("runAsUser"), outer.get("runAsUser")):
        raise PluginError(f"{where}: it runs as root", advice="name another user, or leave runAsUser out for 65532")
    if external and not model_mounted:
        raise PluginError(
            f"{where}: no volume of container {engine['name']} holds {model}, and the sidecar must see it too",
            advice="mount the folder that versions come from, or name the model in it with --model",
        )


def filled(shape: Any, wanted: Wanted, *, root: str) -> Any:
    """Put in what the marks stand for; an item of a list whose mark stands for nothing is left out."""
    given = {name: str(value) for name, value in vars(wanted).items()} | {"root": root}

    def text(value: str) -> str | int:
        found = _MARK.fullmatch(value)
        done = _MARK.sub(lambda mark: str(int(given[mark[1]]) + int(mark[2])) if mark[2] else given[mark[1]], value)
        return int(done) if found is not None and found[1] in ("drain", "checkpoints") else done

    def empty(value: Any) -> bool:
        return isinstance(value, str) and any(given[mark[1]] == "" for mark in _MARK.finditer(value))

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value if not empty(item)]
        return text(value) if isinstance(value, str) else value

    return walk(shape)


def _into_container(engine: Object, ours: Object, wanted: Wanted, *, where: str) -> None:
    """Make the user's container the engine's of a slot."""
    if wanted.words:
        ours["args"] = list(wanted.words)
    for name in _PROBES_AND_PORTS:
        engine.pop(name, None)
    engine.update({name: ours[name] for name in (*_THE_CHARTS, *_PROBES_AND_PORTS) if name in ours})
    if "lifecycle" in ours:
        engine["lifecycle"] = {**(engine.get("lifecycle") or {}), **ours["lifecycle"]}
    engine["securityContext"] = {**ours["securityContext"], **(engine.get("securityContext") or {})}
    variables = {one["name"]: one for one in engine.get("env") or []}
    for one in ours["env"]:
        value = variables.get(one["name"], {}).get("value", "")
        if one["name"] == "PYTHONPATH" and value and one["value"] not in str(value).split(":"):
            raise PluginError(
                f"{where}: PYTHONPATH is set, and the launcher is found by it", advice=f"put {one['value']} first in it"
            )
    engine["env"] = [*variables.values(), *(one for one in ours["env"] if one["name"] not in variables)]
    mounts = list(engine.get("volumeMounts") or [])
    users = {str(PurePosixPath(mount["mountPath"])) for mount in mounts}
    for path in sorted(users & {mount["mountPath"] for mount in ours["volumeMounts"]}):
        if path not in _USERS_OWN_PATHS:
            raise PluginError(f"{where}: something is mounted at {path}", advice="mount it elsewhere")
    engine["volumeMounts"] = [*mounts, *(one for one in ours["volumeMounts"] if one["mountPath"] not in users)]


def _into_spec(workload: Object, pod: Object) -> None:
    """Put what is left of the chart's pod into the user's."""
    spec = _spec(workload)
    claims = [one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates") or []]
    taken = {
        "volumes": {*claims, *(one["name"] for one in spec.get("volumes") or [])},  # a claim would come in its place
        "initContainers": {one["name"] for one in [*(spec.get("initContainers") or []), *spec["containers"]]},
    }
    for kind, names in taken.items():
        mine = pod.pop(kind, [])
        for one in mine:
            if one["name"] in names:
                what = "container" if kind == "initContainers" else "volume"
                problem = f"a {what} is called {one['name']}, as one of modelswap's"
                raise PluginError(f"{title(workload)}: {problem}", advice="rename it")
        if mine:
            spec[kind] = [*(spec.get(kind) or []), *mine]
    grace = pod.pop("terminationGracePeriodSeconds")
    spec["terminationGracePeriodSeconds"] = max(grace, spec.get("terminationGracePeriodSeconds") or 0)
    spec["securityContext"] = {**pod.pop("securityContext"), **(spec.get("securityContext") or {})}
    if len(spec["containers"]) > 1:
        pod.pop("automountServiceAccountToken")  # nobody knows whether the other containers need it
    for name, value in pod.items():
        spec.setdefault(name, value)


def _labelled(workload: Object, slot: str, container: str) -> None:
    template = workload["spec"]["template"]
    meta = template["metadata"] = template.get("metadata") or {}
    for one in (workload["metadata"], meta):
        one["labels"] = {**(one.get("labels") or {}), SLOT_LABEL: slot}
    meta["annotations"] = {_DEFAULT_CONTAINER: container, **(meta.get("annotations") or {})}


def _covering(engine: Object, model: str) -> Object | None:
    """Return the mount that holds the model, the innermost of several."""
    path = PurePosixPath(model)
    mounts = [one for one in engine.get("volumeMounts") or [] if path.is_relative_to(one["mountPath"])]
    return max(mounts, key=lambda one: len(PurePosixPath(one["mountPath"]).parts), default=None)


def _spec(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["spec"]
    return found
