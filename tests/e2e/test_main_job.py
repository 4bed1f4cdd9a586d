"""The main job on a real cluster: versions change under load, no pod restarts, nothing fails or mixes."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path

import pytest

from demo.answers import mixed_by_text
from demo.asking import Question, ask_once
from demo.load import Load
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, decode
from tests.support.models import LOWER, UPPER
from tests.support.plugin import plugin
from tests.support.pod import Pod
from tests.support.reaching import WAIT
from tests.support.stack import Slot

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def manifest_of(model: Path) -> Manifest:
    return decode((model / MANIFEST_FILE).read_bytes())


def identity(pods: dict[str, Pod]) -> dict[str, tuple[str, int, str]]:
    return {name: (pod.uid, pod.restarts, pod.started) for name, pod in pods.items()}


def load_on(slot: Slot) -> Load:
    return Load(slot.cluster.data_url, model=slot.name, streams=4, max_tokens=32, mixed=mixed_by_text(LOWER, UPPER))


async def decided(slot: Slot, version: str, model: str, *, digest: str = "") -> None:
    generation = await asyncio.to_thread(slot.apply, version, model, digest=digest)
    await asyncio.to_thread(slot.wait_ready, generation)


async def test_versions_change_under_load_and_bad_ones_are_refused(slot: Slot) -> None:
    before = identity(slot.pods())
    old, new = manifest_of(slot.models / "v1"), manifest_of(slot.models / "v2")
    async with load_on(slot) as load:
        await load.served_more(8)
        await decided(slot, "1.0", "v1")
        await decided(slot, "1.1", "v2", digest=new.digest)
        await load.served_more(8)
        for pod in slot.pods().values():
            check = await asyncio.to_thread(slot.check, pod)
            assert check.tensors == {entry.name: entry.sha256 for entry in new.tensors}
            assert check.digest == new.digest
        await refused(
            slot, "1.2", "flipped", digest=manifest_of(slot.models / "flipped").digest, names="lm_head.weight"
        )
        await refused(slot, "1.3", "shape", names="model.norm.weight")
        for pod in slot.pods().values():
            assert (await asyncio.to_thread(slot.check, pod)).digest == new.digest
        await load.served_more(8)
        await decided(slot, "1.0", "v1")
        await load.served_more(8)
    for pod in slot.pods().values():
        check = await asyncio.to_thread(slot.check, pod)
        assert check.tensors == {entry.name: entry.sha256 for entry in old.tensors}
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0), summary.lines()
    assert set(summary.by_version) == {"1.0", "1.1"}
    assert identity(slot.pods()) == before
    history = slot.get()["status"]["history"]
    assert {entry["version"] for entry in history} >= {"1.0", "1.1"}


async def test_a_canary_serves_clients_before_the_other_pod_follows(slot: Slot) -> None:
    new = manifest_of(slot.models / "v2")
    canary = {"pods": 1, "soakSeconds": 1, "minRequests": 5, "maxErrorPercent": 0}
    await decided(slot, "1.0", "v1")
    generation = await asyncio.to_thread(slot.apply, "1.1", "v2", rollout={"canary": canary})
    await asyncio.to_thread(slot.wait_field, "{.status.rollout.soak[0].bootID}")
    live = [(await asyncio.to_thread(slot.state, pod)).live for pod in slot.pods().values()]
    assert sorted(ref.version for ref in live if ref is not None) == ["1.0", "1.1"]  # nobody has asked it yet
    ready = asyncio.create_task(asyncio.to_thread(slot.wait_ready, generation))
    async with load_on(slot):
        # Streams keep their connections, and a Service deals those out: all may lead to the other pod.
        while not ready.done():
            await ask_once(slot.cluster.data_url, Question(model=slot.name, max_tokens=4))
    await ready
    states = [await asyncio.to_thread(slot.state, pod) for pod in slot.pods().values()]
    assert {state.live.digest for state in states if state.live is not None} == {new.digest}
    counts = [count for state in states for count in state.answers or () if count.digest == new.digest]
    assert sum(count.answered for count in counts) >= 5
    assert sum(count.failed for count in counts) == 0
    await decided(slot, "1.0", "v1")


async def test_an_adapter_is_there_on_all_pods_changes_with_its_base_and_goes(slot: Slot) -> None:
    old, new = manifest_of(slot.models / "v1"), manifest_of(slot.models / "v2")
    await decided(slot, "1.0", "v1")
    sources = [
        {"uri": f"file://{slot.inside('adapters/' + letter)}", "baseDigest": base}
        for letter, base in (("k", old.digest), ("K", new.digest))
    ]
    await asyncio.to_thread(slot.apply_adapter, "letters", *sources)

    async def says() -> set[str]:
        answers = [await ask_once(slot.cluster.data_url, Question(model="letters", max_tokens=8)) for _ in range(8)]
        return {letter for answer in answers for letter in answer.text or str(answer.error)}

    assert await says() == {"k"}  # whichever pod is asked
    async with load_on(slot) as load:
        await load.served_more(4)
        await decided(slot, "1.1", "v2", digest=new.digest)
        await load.served_more(4)
    assert load.summary().clean, load.summary().lines()
    assert await says() == {"K"}
    await asyncio.to_thread(slot.delete_adapter, "letters")
    for pod in slot.pods().values():
        while (state := await asyncio.to_thread(slot.state, pod)).adapters is None or state.adapters.adapters:
            await asyncio.sleep(0.2)
    await decided(slot, "1.0", "v1")


_ASK_BY_SERVICE = """
import json, sys, time, urllib.error, urllib.request
body = json.dumps({"model": "letters", "prompt": "k", "max_tokens": 8, "temperature": 0}).encode()
request = urllib.request.Request("http://letters/v1/completions", body, {"Content-Type": "application/json"})
ends, said = time.monotonic() + 60, []
while len(said) < 8:
    try: said.append(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["text"])
    except urllib.error.HTTPError as error: sys.exit(f"{error}: {error.read().decode()}")  # one without the adapter
    except OSError:
        if said or time.monotonic() > ends: raise
        time.sleep(0.1)  # the nodes do not know the new Service yet
print(json.dumps(said))
"""


@pytest.mark.full
async def test_a_service_leads_to_the_pods_that_have_the_adapter(slot: Slot) -> None:
    await decided(slot, "1.0", "v1")
    where = {"placement": {"pods": 1}, "service": {"name": "letters", "port": 80}}
    await asyncio.to_thread(slot.apply_adapter, "letters", {"uri": f"file://{slot.inside('adapters/k')}"}, **where)
    for pod in slot.pods():
        done = await asyncio.to_thread(slot.exec_python, pod, _ASK_BY_SERVICE)
        assert done.returncode == 0, done.stderr
        assert {letter for text in json.loads(done.stdout) for letter in text} == {"k"}
    await asyncio.to_thread(slot.delete_adapter, "letters")
    slot.cluster.kubectl("-n", slot.namespace, "wait", "service/letters", "--for=delete", WAIT)


async def refused(slot: Slot, version: str, model: str, *, names: str, digest: str = "") -> None:
    """Apply a bad version; the object says what is wrong with which tensor, and the pods serve on."""
    generation = await asyncio.to_thread(slot.apply, version, model, digest=digest)
    await asyncio.to_thread(slot.wait_stalled, generation)
    text = slot.describe()
    assert names in text
    assert slot.condition("Serving")["status"] == "True"
    assert "Traceback" not in text


async def test_suspend_publishes_the_plan_and_does_nothing(slot: Slot) -> None:
    old, new = manifest_of(slot.models / "v1"), manifest_of(slot.models / "v2")
    await decided(slot, "1.0", "v1")
    await asyncio.to_thread(slot.apply, "1.1", "v2", suspend=True)
    await asyncio.to_thread(slot.wait_condition, "Suspended")
    await asyncio.to_thread(slot.wait_field, "{.status.plan[0].changedTensors}")
    (plan,) = slot.get()["status"]["plan"]
    changed = [entry for entry in new.tensors if old.by_name[entry.name].sha256 != entry.sha256]
    assert plan["fromDigest"] == old.digest
    assert (plan["changedTensors"], plan["changedBytes"]) == (len(changed), sum(entry.nbytes for entry in changed))
    for pod in slot.pods().values():
        live = (await asyncio.to_thread(slot.state, pod)).live
        assert live is not None
        assert live.digest == old.digest
    await decided(slot, "1.0", "v1")


async def test_the_kubectl_plugin_asks_the_pods_and_goes_back(slot: Slot, tmp_path: Path) -> None:
    old, new = manifest_of(slot.models / "v1"), manifest_of(slot.models / "v2")
    await decided(slot, "1.0", "v1")
    await decided(slot, "1.1", "v2", digest=new.digest)

    async def run(*arguments: str, stdin: str | None = None) -> str:
        place = ("--namespace", slot.namespace)
        done = await asyncio.to_thread(plugin, slot.cluster.kubeconfig, *arguments, *place, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    wanted = {key: slot.get()[key] for key in ("apiVersion", "kind", "spec")}
    wanted["metadata"] = {"name": slot.name, "namespace": slot.namespace}
    wanted["spec"] |= {"version": "1.0", "source": {"uri": f"file://{slot.inside('v1')}", "digest": old.digest}}
    (plan,) = json.loads(await run("plan", "-f", "-", "-o", "json", stdin=json.dumps(wanted)))
    changed = [entry for entry in new.tensors if old.by_name[entry.name].sha256 != entry.sha256]
    assert (plan["pods"], plan["plan"]["changedTensors"]) == (len(slot.pods()), len(changed))
    checks = json.loads(await run("check", slot.name, "-o", "json"))
    assert {name: check["digest"] for name, check in checks.items()} == dict.fromkeys(slot.pods(), new.digest)
    archive = tmp_path / "bundle.tar.gz"
    await run("support-bundle", slot.name, "--filename", str(archive))
    with tarfile.open(archive) as bundle:
        names = bundle.getnames()
        unseen = bundle.extractfile(f"modelswap-{slot.name}/unseen.txt")
        assert unseen is not None
        assert unseen.read() == b"everything could be looked at\n"
    assert {f"modelswap-{slot.name}/pods/{name}.state.json" for name in slot.pods()} <= set(names)
    assert "Ready=True" in await run("rollback", slot.name, "--apply")
    assert "Ready" in await run("doctor", slot.name)
    for pod in slot.pods().values():
        assert (await asyncio.to_thread(slot.check, pod)).digest == old.digest
    await decided(slot, "1.1", "v2")
    await decided(slot, "1.0", "v1")  # without the pin that going back has set: the next test asks for it so
