"""``kubectl modelswap`` as a process, with the real kubectl, API server and operator; pods have no kubelet here."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest
import yaml

from tests.api.conftest import NAMESPACE
from tests.support.apiserver import ApiServer
from tests.support.fake_pods import Slot, digest, eventually, ref
from tests.support.fake_sidecar import Content
from tests.support.plugin import plugin
from tests.support.rest import Rest

pytestmark = pytest.mark.api

V10, V11, V12 = ref("1.0", "a"), ref("1.1", "b"), ref("1.2", "c")

Done = subprocess.CompletedProcess[str]


class Terminal:
    """A user with an administrator's kubeconfig."""

    def __init__(self, server: ApiServer, slot: Slot) -> None:
        self._server = server
        self._slot = slot

    async def __call__(self, *arguments: str, stdin: str | None = None) -> Done:
        return await asyncio.to_thread(
            plugin, self._server.kubeconfig, *arguments, "--namespace", NAMESPACE, stdin=stdin
        )


@pytest.fixture
def terminal(definitions: ApiServer, slot: Slot) -> Terminal:
    return Terminal(definitions, slot)


async def two_versions(slot: Slot) -> None:
    """1.0 and then 1.1 were served."""
    for _ in range(2):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)
    slot.bump(V11)
    await slot.ready_at(V11)


async def test_status_history_and_wait(slot: Slot, terminal: Terminal) -> None:
    await two_versions(slot)
    shown = await terminal("status", slot.name)
    assert shown.returncode == 0, shown.stderr
    assert f"{NAMESPACE}/{slot.name}  Ready  2/2 pods serve 1.1" in shown.stdout
    assert all(f"{pod.name}  Serving  1.1" in shown.stdout for pod in slot.pods)
    everywhere = json.loads((await terminal("status", "-A", "-o", "json")).stdout)
    assert slot.name in [item["modelVersion"]["metadata"]["name"] for item in everywhere]
    history = yaml.safe_load((await terminal("history", slot.name, "-o", "yaml")).stdout)
    assert [(entry["version"], entry["result"]) for entry in history] == [("1.1", "Succeeded"), ("1.0", "Succeeded")]
    table = (await terminal("history", slot.name)).stdout
    assert "120 µs" in table
    assert "600 B" not in table.splitlines()[2], "the first version was there already"
    waited = await terminal("wait", slot.name)
    assert (waited.returncode, "Ready=True  2/2 pods serve 1.1" in waited.stdout) == (0, True)


async def test_wait_follows_a_rollout_to_its_end(slot: Slot, terminal: Terminal) -> None:
    await two_versions(slot)
    slot.contents["file:///models/1.2"] = Content(digest("c"))
    slot.pods[0].sidecar.hold_at = None
    waiting = asyncio.create_task(terminal("wait", slot.name))
    slot.bump(V12)
    await slot.ready_at(V12)
    done = await waiting
    assert done.returncode == 0, done.stderr
    assert "Ready=True" in done.stdout.splitlines()[-1]


async def test_a_stalled_slot_ends_a_wait_and_is_diagnosed(slot: Slot, terminal: Terminal) -> None:
    await two_versions(slot)
    slot.bump(V12, pin=digest("9"))
    await slot.stalled("DigestMismatch")
    waited = await terminal("wait", slot.name)
    assert waited.returncode == 1
    assert "is Stalled, DigestMismatch" in waited.stderr
    assert f"next: kubectl modelswap doctor {slot.name}" in waited.stderr
    doctor = await terminal("doctor", slot.name)
    assert doctor.returncode == 1
    assert "problem Stalled, DigestMismatch" in doctor.stdout
    assert "Traceback" not in doctor.stdout + doctor.stderr


async def test_rollback_prints_a_change_and_makes_it_when_asked(slot: Slot, terminal: Terminal) -> None:
    await two_versions(slot)
    printed = await terminal("rollback", slot.name)
    assert printed.returncode == 0, printed.stderr
    assert yaml.safe_load(printed.stdout) == {
        "spec": {"version": "1.0", "source": {"uri": V10.uri, "digest": V10.digest}}
    }
    assert slot.object()["spec"]["version"] == "1.1"
    applied = await terminal("rollback", slot.name, "--apply")
    assert applied.returncode == 0, applied.stderr
    await slot.ready_at(V10)
    managers = [entry["manager"] for entry in slot.object()["metadata"]["managedFields"]]
    assert "modelswap-cli" in managers


@pytest.mark.parametrize("force", [False, True])
async def test_what_gitops_writes_is_left_alone_unless_forced(
    slot: Slot, terminal: Terminal, definitions: ApiServer, force: bool
) -> None:
    await two_versions(slot)
    definitions.kubectl(
        "--namespace", NAMESPACE, "label", f"modelversion/{slot.name}", "kustomize.toolkit.fluxcd.io/name=apps"
    )
    done = await terminal("rollback", slot.name, "--apply", *(["--force"] if force else []))
    if force:
        assert done.returncode == 0, done.stderr
        await slot.ready_at(V10)
    else:
        assert done.returncode == 1
        assert "is written by Flux (Kustomization ?/apps)" in done.stderr
        assert slot.object()["spec"]["version"] == "1.1"


async def test_a_plan_is_refused_by_the_rules_of_the_api_before_any_pod_is_asked(
    slot: Slot, terminal: Terminal
) -> None:
    await two_versions(slot)
    thing = slot.object()
    bad = {k: thing[k] for k in ("apiVersion", "kind")} | {
        "metadata": {"name": slot.name, "namespace": NAMESPACE},
        "spec": thing["spec"] | {"source": {"uri": "file:///models/other"}},  # and the version stays
    }
    done = await terminal("plan", "-f", "-", stdin=json.dumps(bad))
    assert done.returncode == 4
    assert "spec.version" in done.stderr or "version" in done.stderr


async def test_what_is_not_there_or_not_allowed_is_said_in_two_lines(
    slot: Slot, terminal: Terminal, definitions: ApiServer, rest: Rest
) -> None:
    missing = await terminal("doctor", "nobody")
    assert missing.returncode == 4
    assert missing.stderr == (
        'error: modelversions.modelswap.dev "nobody" not found\nnext: look at -n/--namespace and --context\n'
    )
    stranger = definitions.kubeconfig_of("stranger")
    done = await asyncio.to_thread(plugin, stranger, "status", "-n", NAMESPACE)
    assert done.returncode == 4
    assert "next: docs/guides/kubectl.md lists the rights" in done.stderr
    both = await terminal("status", slot.name, "-A")
    assert both.returncode == 2


async def test_a_wait_ends_in_time(slot: Slot, terminal: Terminal) -> None:
    await slot.add_pod(V10, ready=False)
    slot.create(V10)
    await eventually(lambda: slot.condition("Ready") is not None, what=slot.story)
    done = await terminal("wait", slot.name, "--timeout", "2")
    assert done.returncode == 3
    assert "is not Ready after 2 s" in done.stderr


async def test_a_shell_completes_commands_and_names_of_slots(slot: Slot, definitions: ApiServer) -> None:
    slot.create(V10)
    first = await asyncio.to_thread(plugin, definitions.kubeconfig, "hist", module="completion")
    assert first.stdout.splitlines()[0].startswith("history\t")
    assert first.stdout.splitlines()[-1] == ":4"
    words = ("history", "--namespace", NAMESPACE, slot.name[:-1])
    names = await asyncio.to_thread(plugin, definitions.kubeconfig, *words, module="completion")
    assert slot.name in names.stdout.split()
