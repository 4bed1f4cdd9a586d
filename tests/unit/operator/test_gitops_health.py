"""What Argo CD and Flux make of every state that the operator writes, by what `contrib/` gives them.

Argo CD embeds Lua 5.1 and opens few of its libraries; here it is the reference one with the same. Both are asked
themselves too, by programs that take minutes to build, in the lanes that have them built.
"""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from modelswap_operator.api.labels import REQUESTED_AT
from tests.support.cache import REPOSITORY, run_script
from tests.support.gitops import programs
from tests.support.gitops_argo import CONFIG
from tests.support.gitops_states import STATES, Object

DATA: dict[str, str] = yaml.safe_load(CONFIG.read_text())["data"]

EXPECTED = {
    "new": ("Progressing", "InProgress"),
    "without a status": ("Progressing", "InProgress"),
    "no pod has been ready": ("Progressing", "InProgress"),
    "done": ("Healthy", "Current"),
    "scaled to zero": ("Healthy", "Current"),
    "changed at zero": ("Healthy", "Current"),
    "bumped, not seen yet": ("Progressing", "InProgress"),
    "swapping": ("Progressing", "InProgress"),
    "soaking": ("Progressing", "InProgress"),
    "a swap failed and is tried again": ("Progressing", "InProgress"),
    "the plan cannot be had now": ("Progressing", "InProgress"),
    "a pod does not answer": ("Progressing", "InProgress"),
    "a pod restarts": ("Progressing", "InProgress"),
    "overdue": ("Degraded", "Failed"),
    "refused": ("Degraded", "Failed"),
    "rolling back": ("Progressing", "InProgress"),
    "rolled back": ("Degraded", "Failed"),
    "halted": ("Degraded", "Failed"),
    "reverted": ("Healthy", "Current"),
    "suspended when done": ("Suspended", "Current"),
    "suspended when refused": ("Degraded", "Failed"),
    "suspended before it began": ("Suspended", "InProgress"),
    "suspended in the middle": ("Progressing", "InProgress"),
    "resumed, not seen yet": ("Progressing", "InProgress"),
    "unreadable": ("Degraded", "Failed"),
    "adapter, new": ("Progressing", "InProgress"),
    "adapter, loading": ("Progressing", "InProgress"),
    "adapter, loaded": ("Healthy", "Current"),
    "adapter, edited, not seen yet": ("Progressing", "InProgress"),
    "adapter, its source cannot be read now": ("Progressing", "InProgress"),
    "adapter, impossible": ("Degraded", "Failed"),
    "adapter, suspended": ("Suspended", "InProgress"),
    "adapter, its slot is suspended": ("Progressing", "InProgress"),
    "adapter, its slot is gone": ("Progressing", "InProgress"),
}


def run(script: str, obj: Object) -> Any:
    """Run a script as Argo CD does: the object is the global ``obj``, and few libraries are open."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.execute("string, math, io, os, coroutine, debug = nil")
    lua.globals().obj = lua.table_from(obj, recursive=True)
    return lua.execute(script)


@pytest.mark.parametrize("state", STATES)
def test_health(state: str) -> None:
    found = STATES[state]()
    verdict = run(DATA[f"resource.customizations.health.modelswap.dev_{found['kind']}"], found)
    conditions = found.get("status", {}).get("conditions", [])
    assert (verdict.status, verdict.message != "") == (EXPECTED[state][0], True), conditions


@pytest.mark.cluster
def test_flux_reads_the_same_from_conditions_and_from_expressions() -> None:
    run_script("gitops/build.sh", "flux-verdict")
    kustomization = yaml.safe_load((REPOSITORY / "contrib/flux/kustomization.yaml").read_text())
    exprs = {item["kind"]: item for item in kustomization["spec"]["healthCheckExprs"]}
    known = {name: make() for name, make in STATES.items() if name != "without a status"}  # the schema gives each one
    question = json.dumps({"exprs": exprs, "objects": list(known.values())})
    done = subprocess.run([programs() / "flux-verdict"], input=question, text=True, capture_output=True, check=True)
    answers = dict(zip(known, json.loads(done.stdout), strict=True))
    assert answers == {name: [EXPECTED[name][1]] * 2 for name in known}


@pytest.mark.cluster
@pytest.mark.full
def test_argo_cd_itself_reads_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        said = pool.map(lambda name: argocd("health", STATES[name](), tmp_path / name), STATES)
        answers = dict(zip(STATES, said, strict=True))
    assert {name: lines[0] for name, lines in answers.items()} == {
        name: f"STATUS: {verdict}" for name, (verdict, _) in EXPECTED.items()
    }


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.parametrize(
    ("state", "action", "change"),
    [
        ("swapping", "suspend", [">   suspend: true"]),
        ("suspended when done", "resume", ["<   suspend: true"]),
        ("overdue", "retry", [">   annotations:", f">     {REQUESTED_AT}: "]),
        ("adapter, loaded", "suspend", [">   suspend: true"]),
        ("adapter, suspended", "resume", ["<   suspend: true"]),
    ],
)
def test_actions_in_argo_cd_itself_change_nothing_else(
    state: str, action: str, change: list[str], tmp_path: Path
) -> None:
    found = STATES[state]()
    assert f"{action} false" in [" ".join(line.split()) for line in argocd("list-actions", found, tmp_path / "list")]
    lines = [line for line in argocd("run-action", found, tmp_path / "run", action) if line.startswith(("<", ">"))]
    assert [line[: len(begin)] for line, begin in zip(lines, change, strict=True)] == change


def argocd(command: str, obj: Object, folder: Path, *options: str) -> list[str]:
    """Ask Argo CD's own program what its settings make of an object; return what it says, by lines."""
    run_script("gitops/build.sh", "argocd")
    folder.mkdir()
    resource = folder / "resource.yaml"
    resource.write_text(yaml.safe_dump(obj))
    settings = ["admin", "settings", "resource-overrides", command, str(resource), *options]
    done = subprocess.run(
        [programs() / "argocd", *settings, "--argocd-cm-path", str(CONFIG)],
        text=True,
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
    )
    return done.stdout.splitlines()


def test_the_message_is_what_the_operator_says_of_this_generation() -> None:
    script = DATA["resource.customizations.health.modelswap.dev_ModelVersion"]
    assert run(script, STATES["swapping"]()).message.startswith("0/2 pods serve 1.1")
    assert "not looked" in run(script, STATES["bumped, not seen yet"]()).message
    assert run(script, STATES["refused"]()).message.startswith("2.0 refused by pod pod-1: other content")


@pytest.mark.parametrize("kind", ["ModelVersion", "LoRAAdapter"])
def test_suspend_and_resume(kind: str) -> None:
    scripts, discovery = actions(kind)
    found = next(made for made in (make() for make in STATES.values()) if made["kind"] == kind)
    assert offered(discovery, found) >= {"suspend"}
    assert run(scripts["suspend"], found).spec.suspend is True
    suspended = {**found, "spec": {**found["spec"], "suspend": True}}
    assert offered(discovery, suspended) >= {"resume"}
    assert "suspend" not in offered(discovery, suspended)
    assert run(scripts["resume"], suspended).spec.suspend is None


@pytest.mark.parametrize(
    ("done", "waiting"), [("done", "overdue"), ("adapter, loaded", "adapter, its source cannot be read now")]
)
def test_a_retry_is_offered_where_there_is_something_to_try(done: str, waiting: str) -> None:
    overdue = STATES[waiting]()
    scripts, discovery = actions(overdue["kind"])
    assert "retry" not in offered(discovery, STATES[done]())
    assert "retry" in offered(discovery, overdue)
    for metadata in ({}, {"annotations": {"other": "kept"}}):
        asked = run(scripts["retry"], {**overdue, "metadata": {**overdue["metadata"], **metadata}})
        annotations = dict(asked.metadata.annotations.items())
        assert datetime.fromisoformat(annotations.pop(REQUESTED_AT)).tzinfo is not None
        assert annotations == metadata.get("annotations", {})


def actions(kind: str) -> tuple[dict[str, str], str]:
    """Return the scripts of a kind's actions by name, and the one that says which are offered."""
    found = yaml.safe_load(DATA[f"resource.customizations.actions.modelswap.dev_{kind}"])
    return {item["name"]: item["action.lua"] for item in found["definitions"]}, found["discovery.lua"]


def offered(discovery: str, obj: Object) -> set[str]:
    return {name for name, item in run(discovery, obj).items() if not item.disabled}
