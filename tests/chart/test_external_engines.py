"""Pods whose engine has a container of its own: a native sidecar that outlives it, and one door."""

import re
from typing import Any

import pytest
import yaml

from tests.support.cache import REPOSITORY
from tests.support.charts import CHARTS, Charts, Object, one, pod_templates

CHART = "modelswap-engine"
KINDS = ("vllm", "sglang")
every_kind = pytest.mark.parametrize("kind", KINDS)


def values(kind: str, **more: Any) -> dict[str, Any]:
    engine = {
        "kind": kind,
        "experimental": True,
        "image": {"repository": "acme/engine", "tag": "1"},
        "checkpoints": {"sizeLimit": "3Gi"},
        **more.pop("engine", {}),
    }
    models = {"persistentVolumeClaim": {"claimName": "models"}}
    return {"model": {"path": "/models/m"}, "models": models, "engine": engine, **more}


def spec(objects: list[Object]) -> Object:
    found: Object = next(pod_templates(objects))["spec"]
    return found


def sidecar(objects: list[Object]) -> Object:
    (found,) = [c for c in spec(objects)["initContainers"] if c["name"] == "modelswap"]
    return dict(found)


def engine(objects: list[Object]) -> Object:
    (found,) = spec(objects)["containers"]
    return dict(found)


def mounts(container: Object) -> dict[str, Object]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


def volumes(objects: list[Object]) -> dict[str, Object]:
    return {volume["name"]: volume for volume in spec(objects)["volumes"]}


@every_kind
def test_the_sidecar_is_native_and_does_not_wait_for_the_engine(charts: Charts, kind: str) -> None:
    objects = charts.template(CHART, values(kind))
    container = sidecar(objects)
    assert container["restartPolicy"] == "Always"
    assert container["args"][:3] == ["proxy", f"--backend={kind}", "--upstream=http://127.0.0.1:8100"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    assert [c["name"] for c in spec(objects)["initContainers"]] == ["engine-files", "modelswap"]
    assert "restartPolicy" not in spec(objects)["initContainers"][0]


@every_kind
def test_the_engine_has_no_door_of_its_own(charts: Charts, kind: str) -> None:
    objects = charts.template(CHART, values(kind))
    container = engine(objects)
    assert "ports" not in container
    assert not any("--host" in argument for argument in container["args"])  # the launcher sets it
    assert one(objects, "Service")["spec"]["ports"][0]["targetPort"] == 8000
    rules = one(objects, "NetworkPolicy")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in rules] == [8000, 8001]


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("vllm", ["vllm", "serve", "{model}"]),
        ("sglang", ["python3", "-m", "sglang.launch_server", "--model-path={model}"]),
    ],
)
def test_the_launcher_starts_the_engine_on_the_sidecars_checkpoint(
    charts: Charts, kind: str, command: list[str]
) -> None:
    objects = charts.template(CHART, values(kind, slot="chat", engine={"args": ["--flag=1"], "port": 9000}))
    container = engine(objects)
    assert container["command"][:4] == ["python3", "-m", "modelswap_engine.backends.launch", f"--engine={kind}"]
    assert container["command"][4] == "--port=9000"
    assert container["command"][-1] == "--"
    assert container["args"] == [*command, "--served-model-name=chat", "--flag=1"]
    assert "--upstream=http://127.0.0.1:9000" in sidecar(objects)["args"]
    assert {"name": "PYTHONPATH", "value": "/opt/modelswap-files"} in container["env"]
    assert mounts(container)["/opt/modelswap-files"]["readOnly"] is True
    assert spec(objects)["initContainers"][0]["args"] == ["engine-files", "/opt/modelswap-files"]


def test_a_command_of_ones_own_replaces_the_default(charts: Charts) -> None:
    container = engine(charts.template(CHART, CHARTS / CHART / "ci" / "sglang-values.yaml"))
    assert container["command"][0] == "/opt/sglang/bin/python"
    assert container["args"][:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    assert not any(argument.startswith("--served-model-name") for argument in container["args"])


@every_kind
def test_the_sidecar_has_an_image_without_an_engine(charts: Charts, kind: str) -> None:
    for container in spec(charts.template(CHART, values(kind, image={"tag": "1.2"})))["initContainers"]:
        assert container["image"] == "modelswap/sidecar:1.2"
    named = charts.template(CHART, values(kind, image={"repository": "acme/modelswap", "tag": "1.2"}))
    assert sidecar(named)["image"] == "acme/modelswap:1.2"


@every_kind
def test_checkpoints_are_at_one_path_in_both_containers_and_only_the_sidecar_writes(charts: Charts, kind: str) -> None:
    objects = charts.template(CHART, values(kind))
    path = "/var/lib/modelswap-checkpoints"
    assert mounts(engine(objects))[path] == {"name": "checkpoints", "mountPath": path, "readOnly": True}
    assert mounts(sidecar(objects))[path] == {"name": "checkpoints", "mountPath": path}
    assert volumes(objects)["checkpoints"]["emptyDir"] == {"sizeLimit": "3Gi"}
    assert f"--checkpoint-dir={path}" in sidecar(objects)["args"]
    assert f"--checkpoint-bytes={3 << 30}" in sidecar(objects)["args"]
    # What changes is staged inside the engine, from where the sidecar was told that it is.
    assert mounts(engine(objects))["/models"] == mounts(sidecar(objects))["/models"]
    assert mounts(engine(objects))["/models"]["readOnly"] is True


@every_kind
def test_the_admin_key_is_in_memory_and_in_no_specification(charts: Charts, kind: str) -> None:
    objects = charts.template(CHART, values(kind))
    assert volumes(objects)["runtime"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Mi"}
    for container in (engine(objects), sidecar(objects)):
        assert "readOnly" not in mounts(container)["/run/modelswap"]
        assert "--runtime-dir=/run/modelswap" in [*container.get("command", []), *container["args"]]
    assert "securityContext" in spec(objects)  # one user for both, or they would not believe each other
    assert not any("runAsUser" in c["securityContext"] for c in (engine(objects), sidecar(objects)))


@pytest.mark.parametrize(("restart", "argument"), [("Allowed", "allowed"), ("Never", "never")])
@every_kind
def test_liveness_of_the_engine_asks_the_sidecar_by_a_number(
    charts: Charts, kind: str, restart: str, argument: str
) -> None:
    objects = charts.template(CHART, values(kind, engine={"restart": restart}))
    assert engine(objects)["livenessProbe"]["httpGet"] == {"path": "/engine-livez", "port": 8001}
    assert f"--engine-restart={argument}" in sidecar(objects)["args"]
    assert {"startupProbe", "readinessProbe"}.isdisjoint(engine(objects))  # the sidecar's /readyz speaks for both


@every_kind
def test_the_door_outlives_the_requests_and_the_grace_period_all_of_it(charts: Charts, kind: str) -> None:
    objects = charts.template(CHART, values(kind, drainSeconds=600, engine={"stopSeconds": 40}))
    hook = engine(objects)["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:3] == ["python3", "-m", "modelswap_engine.backends.drain"]
    assert {"--control-port=8001", "--seconds=610"} <= set(hook)
    assert "--drain-seconds=600" in sidecar(objects)["args"]
    assert "--stop-seconds=40" in engine(objects)["command"]
    assert spec(objects)["terminationGracePeriodSeconds"] == 665
    assert spec(objects)["terminationGracePeriodSeconds"] > 610 + 40


@every_kind
def test_volumes_are_bounded_and_shared_memory_counts(charts: Charts, kind: str) -> None:
    objects = charts.template(CHART, values(kind))
    found = volumes(objects)
    assert found["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert all("sizeLimit" in volume["emptyDir"] for volume in found.values() if "emptyDir" in volume)
    container = engine(objects)
    assert mounts(container)["/dev/shm"]["name"] == "shm"
    assert {"name": "TMPDIR", "value": "/tmp"} in container["env"]
    assert mounts(container)["/tmp"]["name"] == "engine-tmp" != mounts(sidecar(objects))["/tmp"]["name"]


@pytest.mark.parametrize("memory", ["1Gi", "512Mi", "1073741824"])
def test_shared_memory_that_the_limit_cannot_hold_is_refused(charts: Charts, memory: str) -> None:
    done = charts.try_template(CHART, values("vllm", resources={"limits": {"memory": memory}}))
    assert done.returncode != 0
    assert f"resources.limits.memory ({memory}) must be above shm.sizeLimit (1Gi)" in done.stderr


@every_kind
def test_experimental_kinds_must_be_asked_for(charts: Charts, kind: str) -> None:
    done = charts.try_template(CHART, values(kind, engine={"experimental": False}))
    assert done.returncode != 0
    assert f"engine.kind {kind} is experimental" in done.stderr
    assert "docs/backends.md" in done.stderr


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"engine": {"image": {"tag": "1"}}}, "engine.image.repository is required when engine.kind is vllm"),
        ({"engine": {"image": {"repository": "a"}}}, "set digest or tag"),
        ({"engine": {"checkpoints": {"sizeLimit": ""}}}, "engine.checkpoints.sizeLimit is required"),
        ({"tensorParallel": 2}, "tensorParallel: of the embedded engine only"),
        ({"device": "cuda", "kvCache": {"blocks": 5}}, "device, kvCache.blocks: of the embedded engine only"),
        ({"trainer": {"peers": ["10.0.0.0/8"]}}, "trainer.peers: of the embedded engine only"),
        ({"resources": {"limits": {"memory": "1.5Gi"}}}, "write a whole number"),
    ],
)
def test_values_that_cannot_work_are_refused(charts: Charts, more: dict[str, Any], word: str) -> None:
    done = charts.try_template(CHART, values("vllm", **more))
    assert done.returncode != 0
    assert word in done.stderr


def test_notes_say_what_is_experimental_and_where_to_read_of_it() -> None:
    notes = (CHARTS / CHART / "templates" / "NOTES.txt").read_text()
    assert re.search(r"Experimental: engine\.kind .*docs/backends\.md", notes)


def test_embedded_pods_have_nothing_of_this(charts: Charts) -> None:
    objects = charts.template(CHART, {"model": {"path": "/models/m"}})
    assert "initContainers" not in spec(objects)
    assert set(volumes(objects)) == {"assignment", "state", "tmp", "token"}
    assert "lifecycle" not in engine(objects)


def guided(name: str) -> dict[str, Any]:
    """Return the values that a user's guide shows."""
    guide = (REPOSITORY / "docs" / "guides" / f"{name}.md").read_text()
    block = re.search(r"```\n(slot: chat\n.*?)```", guide, re.DOTALL)
    assert block is not None
    found: dict[str, Any] = yaml.safe_load(block[1])
    return found


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_values_of_a_guide_render_as_they_are_written(charts: Charts, name: str) -> None:
    values = guided(name)
    objects = charts.template(CHART, values)
    container = engine(objects)
    assert container["image"] == f"registry.example.com/{name}-cpu:{values['engine']['image']['tag']}"
    assert container["args"][-len(values["engine"]["args"]) :] == values["engine"]["args"]
    assert "--served-model-name=chat" in container["args"]
    assert (
        container["args"][:3]
        == {
            "vllm": ["vllm", "serve", "{model}"],
            "sglang": ["python3", "-m", "sglang.launch_server"],
        }[name]
    )
    assert volumes(objects)["models"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


@every_kind
def test_the_engine_reads_what_the_sidecar_fetched_by_the_same_path(charts: Charts, kind: str) -> None:
    sources = {"allow": ["s3://b/m"], "claims": ["more"], "store": {"sizeLimit": "40Gi"}}
    sources["credentials"] = [{"name": "reader", "secretName": "s3"}]
    objects = charts.template(CHART, values(kind, sources=sources))
    before, behind = mounts(sidecar(objects)), mounts(engine(objects))
    for path in ("/var/lib/modelswap-store", "/claims/more"):
        assert behind[path]["name"] == before[path]["name"]
        assert behind[path]["readOnly"]
    assert not before["/var/lib/modelswap-store"].get("readOnly", False)
    assert "/etc/modelswap/credentials/reader" in before
    assert not any("credentials" in path for path in behind), "the engine has no use for them"
