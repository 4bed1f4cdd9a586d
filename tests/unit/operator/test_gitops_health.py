"""What Argo CD makes of every state that the operator writes, by the Lua that `contrib/argocd` gives it.

Argo CD embeds Lua 5.1; here it is the reference one. `tests/e2e/test_gitops.py` asks Argo CD itself.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from modelswap_operator.api.labels import REQUESTED_AT
from tests.support.cache import REPOSITORY
from tests.support.gitops_states import STATES, Object

DATA: dict[str, str] = yaml.safe_load((REPOSITORY / "contrib/argocd/argocd-cm.yaml").read_text())["data"]

EXPECTED = {
    "new": "Progressing",
    "without a status": "Progressing",
    "no pod has been ready": "Progressing",
    "done": "Healthy",
    "scaled to zero": "Healthy",
    "bumped, not seen yet": "Progressing",
    "swapping": "Progressing",
    "a swap failed and is tried again": "Progressing",
    "the plan cannot be had now": "Progressing",
    "a pod does not answer": "Progressing",
    "a pod restarts": "Progressing",
    "overdue": "Degraded",
    "refused": "Degraded",
    "rolling back": "Progressing",
    "rolled back": "Degraded",
    "halted": "Degraded",
    "reverted": "Healthy",
    "suspended when done": "Suspended",
    "suspended when refused": "Degraded",
    "suspended before it began": "Suspended",
    "suspended in the middle": "Progressing",
    "resumed, not seen yet": "Progressing",
    "unreadable": "Degraded",
    "adapter, new": "Progressing",
    "adapter, loading": "Progressing",
    "adapter, loaded": "Healthy",
    "adapter, impossible": "Degraded",
    "adapter, suspended": "Suspended",
}


def run(script: str, obj: Object) -> Any:
    """Run a script as Argo CD does: the object is the global ``obj``, what it returns is the answer."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(obj, recursive=True)
    return lua.execute(script)


@pytest.mark.parametrize("state", STATES)
def test_health(state: str) -> None:
    found = STATES[state]()
    verdict = run(DATA[f"resource.customizations.health.modelswap.dev_{found['kind']}"], found)
    conditions = found.get("status", {}).get("conditions", [])
    assert (verdict.status, verdict.message != "") == (EXPECTED[state], True), conditions


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


def test_a_retry_is_offered_where_there_is_something_to_try() -> None:
    scripts, discovery = actions("ModelVersion")
    assert "retry" not in offered(discovery, STATES["done"]())
    overdue = STATES["overdue"]()
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
