"""`kubectl modelswap inject` prints the pod that the engine chart renders: one description, two ways to it."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from modelswap_operator.cli.app import app
from tests.support.apiserver import ApiServer
from tests.support.cache import REPOSITORY
from tests.support.charts import Charts, Object, one

CHART = "modelswap-engine"
ARGUMENTS = ["--version=1.0", "--drain-seconds=90", "--operator=ops:swapper"]
EXTERNAL = ["--experimental", "--checkpoints=60Gi"]
OPTIONS = {"vllm": EXTERNAL, "sglang": EXTERNAL, "embedded": ["--engine=embedded", "--model=/models/chat-1.0"]}
COMMANDS = {
    "vllm": ["vllm", "serve", "/models/chat-1.0", "--port", "9000", "--served-model-name=chat", "--dtype=half"],
    "sglang": ["python3", "-m", "sglang.launch_server", "--model-path=/models/chat-1.0", "--host=::", "--dtype=half"],
    "embedded": ["anything"],
}
RESOURCES = {"requests": {"cpu": "8", "memory": "48Gi"}, "limits": {"memory": "64Gi"}}
every_engine = pytest.mark.parametrize("engine", COMMANDS)


def users(engine: str) -> Object:
    """A Deployment as somebody has it before modelswap."""
    container = {
        "name": "engine",
        "image": "registry.example.com/engine:1",
        "imagePullPolicy": "IfNotPresent",
        "command": COMMANDS[engine][:1],
        "args": COMMANDS[engine][1:],
        "ports": [{"containerPort": 9000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 9000}},
        "resources": RESOURCES,
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    }
    volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}]
    labels = {"app": "chat"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "chat"}, "spec": spec}


def chart_values(engine: str) -> Object:
    values: dict[str, Any] = {
        "slot": "chat",
        "model": {"path": "/models/chat-1.0", "version": "1.0"},
        "models": {"persistentVolumeClaim": {"claimName": "models"}},
        "resources": RESOURCES,
        "drainSeconds": 90,
        "operator": {"namespace": "ops", "serviceAccount": "swapper"},
    }
    if engine != "embedded":
        image = {"repository": "registry.example.com/engine", "tag": "1"}
        checkpoints = {"sizeLimit": "60Gi"}
        values["engine"] = {"kind": engine, "experimental": True, "image": image, "args": ["--dtype=half"]}
        values["engine"]["checkpoints"] = checkpoints
    return values


def inject(text: str, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["inject", "-f", "-", *arguments], input=text, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def in_order(spec: Object) -> Object:
    """A pod whose lists that have no order are sorted, without what belongs to the chart's other objects."""
    found = copy.deepcopy(spec)
    for other in ("serviceAccountName", "topologySpreadConstraints"):
        found.pop(other, None)
    for container in [*found.get("initContainers", []), *found["containers"]]:
        container["volumeMounts"].sort(key=lambda mount: mount["mountPath"])
    found["volumes"].sort(key=lambda volume: volume["name"])
    for volume in found["volumes"]:
        if volume["name"] == "checkpoints":  # the same number of bytes, in words
            volume["emptyDir"]["sizeLimit"] = str(volume["emptyDir"]["sizeLimit"]).replace("60Gi", str(60 * 2**30))
    # The options of an engine are the user's, in the user's order.
    last = found["containers"][0]
    last["args"] = last["args"][:4] + sorted(last["args"][4:])
    return found


@pytest.mark.parametrize("tls", ["", "chat-tls"])
@every_engine
def test_the_pod_is_that_of_the_chart(charts: Charts, engine: str, tls: str) -> None:
    values = chart_values(engine) | ({"controlTls": {"enabled": True, "secretName": tls}} if tls else {})
    rendered = one(charts.template(CHART, values), "Deployment")["spec"]["template"]
    more = [f"--control-tls-secret={tls}"] if tls else []
    printed = inject(yaml.safe_dump(users(engine)), *ARGUMENTS, *OPTIONS[engine], *more)
    template = yaml.safe_load(printed)["spec"]["template"]
    assert ("modelswap-tls" in printed, f"secretName: {tls}" in printed) == (bool(tls), bool(tls))
    assert in_order(template["spec"]) == in_order(rendered["spec"])
    assert template["metadata"]["labels"] == {"app": "chat", "modelswap.dev/slot": "chat"}
    assert template["metadata"]["annotations"] == rendered["metadata"]["annotations"]


@pytest.mark.api
@every_engine
def test_an_api_server_takes_what_is_printed(definitions: ApiServer, engine: str) -> None:
    printed = inject(yaml.safe_dump(users(engine)), *OPTIONS[engine])
    definitions.kubectl("apply", "--dry-run=server", "--validate=strict", "-n", "default", "-f", "-", stdin=printed)


def test_its_pods_are_the_charts_of_this_checkout() -> None:
    command = [sys.executable, str(REPOSITORY / "hack/gen_pods.py"), "--check"]
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_changed_chart_is_noticed(tmp_path: Path) -> None:
    for folder in ("charts", "hack", "operator/modelswap_operator/cli"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    chart = tmp_path / "charts/modelswap-engine/templates/_external.tpl"
    chart.write_text(chart.read_text().replace('path" "/engine-livez', 'path" "/other'))
    command = [sys.executable, str(REPOSITORY / "hack/gen_pods.py"), "--root", str(tmp_path)]
    assert "is stale" in subprocess.run([*command, "--check"], text=True, capture_output=True, check=False).stderr
    subprocess.run(command, check=True)
    assert "path: /other" in (tmp_path / "operator/modelswap_operator/cli/pods.yaml").read_text()
