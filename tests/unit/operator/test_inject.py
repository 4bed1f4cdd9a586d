"""`kubectl modelswap inject`: what it reads from a container's command, what it refuses, what it leaves as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from modelswap_operator.cli.app import app
from modelswap_operator.cli.engine_commands import read
from modelswap_operator.cli.failures import PluginError, UsageError
from modelswap_operator.cli.splicing import spliced

WORKLOAD = """\
# What serves the chat.
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: chat   # also the slot
  labels: {app: chat}
spec:
  serviceName: chat
  selector: {matchLabels: {app: chat}}
  template:
    metadata: {labels: {app: chat}}
    spec:
      containers:
        # the server
        - name: server
          image: vllm/vllm-openai:v0.32.0   # pinned
          command: [vllm, serve]
          args:
            - /models/chat-1.0/
            - --port=8080
          ports: [{containerPort: 8080}]
          env:
            - name: SOMETHING   # said by somebody
              value: "yes"
          volumeMounts:
            - {name: models, mountPath: /models, subPath: all}
      # where models lie
      volumes:
        - name: models
          persistentVolumeClaim: {claimName: models}
---
apiVersion: v1
kind: Service   # another thing
metadata: {name: chat}
"""
OPTIONS = ("--experimental", "--checkpoints=60Gi")


def run(text: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["inject", "-f", "-", *arguments], input=text)


def inject(text: str, *arguments: str) -> str:
    done = run(text, *OPTIONS, *arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout


def changed(**pod: Any) -> str:
    """The workload with fields of its pod changed; ``container`` is the first container's."""
    workload = next(iter(yaml.safe_load_all(WORKLOAD)))
    spec = workload["spec"]["template"]["spec"]
    spec["containers"][0].update(pod.pop("container", {}))
    spec["containers"] += pod.pop("more", [])
    spec.update(pod)
    return yaml.safe_dump(workload)


def pod_of(text: str) -> Any:
    return next(iter(yaml.safe_load_all(text)))["spec"]["template"]["spec"]


def test_comments_and_other_documents_stay() -> None:
    printed = inject(WORKLOAD)
    for line in WORKLOAD.splitlines():
        comment = line.partition("#")[2]
        assert not comment or f"#{comment}" in printed
    assert printed.endswith(WORKLOAD.partition("---\n")[2])
    untouched = [line for line in WORKLOAD.splitlines() if "- name: SOMETHING" in line or "serviceName" in line]
    assert all(line in printed.splitlines() for line in untouched)


def test_a_second_time_changes_nothing() -> None:
    printed = inject(WORKLOAD)
    again = run(printed)
    assert again.exit_code == 0
    assert again.stdout == printed
    assert "already" in again.stderr
    for option in ("--slot=other", "--engine=sglang"):
        assert "already" in str(run(printed, option).exception)


def test_the_sidecar_sees_the_folder_of_the_model_and_may_read_below_it() -> None:
    sidecar = pod_of(inject(WORKLOAD))["initContainers"][-1]
    assert {"name": "models", "mountPath": "/models", "subPath": "all", "readOnly": True} in sidecar["volumeMounts"]
    assert "--allow-root=/models" in sidecar["args"]
    assert "--model=/models/chat-1.0/" in sidecar["args"]
    assert not any(argument.startswith("--version") for argument in sidecar["args"])


def test_what_the_object_says_itself_stays() -> None:
    shared = {"name": "dshm", "mountPath": "/dev/shm/"}
    mounts = [{"name": "models", "mountPath": "/models"}, shared]
    variables = [{"name": "HOME", "value": "/models/home"}]
    text = changed(
        container={"volumeMounts": mounts, "env": variables, "lifecycle": {"postStart": {"exec": {"command": ["a"]}}}},
        securityContext={"runAsUser": 1000},
        terminationGracePeriodSeconds=900,
        initContainers=[{"name": "fetch", "image": "f"}],
        more=[{"name": "other", "image": "o"}],
    )
    pod = pod_of(inject(text, "--container=server"))
    engine = pod["containers"][0]
    assert [one["name"] for one in pod["initContainers"]] == ["fetch", "engine-files", "modelswap"]
    assert pod["terminationGracePeriodSeconds"] == 900
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) == (1000, 65532)
    assert [one for one in engine["env"] if one["name"] == "HOME"] == variables
    assert [one["name"] for one in engine["volumeMounts"] if one["mountPath"].startswith("/dev/shm")] == ["dshm"]
    assert "shm" not in {volume["name"] for volume in pod["volumes"]}
    assert set(engine["lifecycle"]) == {"postStart", "preStop"}
    assert "automountServiceAccountToken" not in pod  # the other container may need its token


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        ({"more": [{"name": "b", "image": "b"}]}, "2 containers"),
        ({"container": {"command": None}}, "has no command"),
        ({"container": {"command": ["sh", "-c"], "args": ["vllm serve /models/m"]}}, "vllm nor sglang"),
        ({"container": {"command": ["sh", "-c", "vllm", "/models/m"]}}, "a line of a shell"),
        ({"container": {"command": ["start"]}}, "vllm nor sglang"),
        ({"container": {"args": ["--dtype=half"]}}, "does not show where the model is"),
        ({"container": {"args": ["acme/chat"]}}, "acme/chat, which is no folder"),
        ({"container": {"args": ["/elsewhere/m"]}}, "no volume of container server holds /elsewhere/m"),
        ({"container": {"args": ["/models/m", "--worker-extension-cls=mine"]}}, "--worker-extension-cls is set"),
        ({"container": {"args": ["/models/m", "--served-model-name", "a", "b"]}}, "has 2 names"),
        ({"container": {"lifecycle": {"preStop": {"sleep": {"seconds": 5}}}}}, "has a preStop hook"),
        ({"container": {"securityContext": {"runAsUser": 7}}}, "must be one user"),
        ({"container": {"env": [{"name": "PYTHONPATH", "value": "/mine"}]}}, "PYTHONPATH is set"),
        ({"securityContext": {"runAsUser": 0}}, "runs as root"),
        ({"hostNetwork": True}, "would be the node's"),
        ({"initContainers": [{"name": "modelswap", "image": "m"}]}, "a container is called modelswap"),
        ({"volumes": [{"name": "models", "emptyDir": {}}, {"name": "state", "emptyDir": {}}]}, "is called state"),
    ],
)
def test_what_cannot_be_known_or_would_break_is_refused(pod: dict[str, Any], words: str) -> None:
    error = run(changed(**pod), *OPTIONS).exception
    assert isinstance(error, PluginError)
    assert words in error.message
    assert "statefulset chat" in error.message
    assert error.advice


def test_a_claim_of_a_stateful_set_does_not_come_in_the_place_of_a_volume() -> None:
    claims = "volumeClaimTemplates:\n  - metadata: {name: state}\n  "
    error = run(WORKLOAD.replace("serviceName: chat\n", f"serviceName: chat\n  {claims}"), *OPTIONS).exception
    assert "a volume is called state" in str(error)


def test_ports_of_other_containers_are_not_taken() -> None:
    text = changed(more=[{"name": "metrics", "image": "m", "ports": [{"containerPort": 8001}]}])
    assert "container metrics has port 8001" in str(run(text, *OPTIONS, "--container=server").exception)
    mounts = [{"name": "models", "mountPath": "/models"}, {"name": "models", "mountPath": "/run/modelswap"}]
    assert "mounted at /run/modelswap" in str(run(changed(container={"volumeMounts": mounts}), *OPTIONS).exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoints=60Gi"], "vllm is experimental"),
        (["--experimental"], "--checkpoints is needed"),
        (["--experimental", "--checkpoints=1.5Gi"], "a whole number"),
        ([*OPTIONS, "--slot=Chat"], "cannot be the name of a slot"),
        ([*OPTIONS, "--container=b"], "no container is called b"),
        (["--engine=embedded"], "the model's folder is not known"),
    ],
)
def test_what_only_the_user_knows_is_asked_for(arguments: list[str], words: str) -> None:
    error = run(WORKLOAD, *arguments).exception
    assert isinstance(error, PluginError)
    assert words in error.message


@pytest.mark.parametrize(
    "text", ["", "kind: DaemonSet\n", "kind: Deployment\nspec: {}\n", f"{WORKLOAD}---\n{WORKLOAD}", "a: [b"]
)
def test_a_file_without_the_one_workload_is_refused(text: str) -> None:
    assert isinstance(run(text, *OPTIONS).exception, PluginError)


def test_json_has_every_document() -> None:
    printed = json.loads(inject(WORKLOAD, "-o", "json"))
    assert [thing["kind"] for thing in printed["items"]] == ["StatefulSet", "Service"]
    assert json.loads(inject(changed(), "-o", "json"))["kind"] == "StatefulSet"


def test_users_hear_what_else_changes(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(WORKLOAD)
    said = CliRunner().invoke(app, ["inject", "-f", str(file), *OPTIONS]).stderr
    assert "port 8080 is gone" in said
    assert "a ModelVersion named chat" in said
    assert isinstance(run(WORKLOAD, "--engine=vllm").exception, UsageError)
    assert "absent.yaml" in str(CliRunner().invoke(app, ["inject", "-f", "absent.yaml"]).exception)


@pytest.mark.parametrize(
    ("engine", "words", "kept", "model"),
    [
        ("vllm", ["vllm", "serve", "/m", "--host", "::", "--port=1"], ["vllm", "serve", "{model}"], "/m"),
        ("vllm", ["vllm", "serve", "--model=/m"], ["vllm", "serve", "--model={model}"], "/m"),
        ("vllm", ["vllm", "serve", "{model}", "-q"], ["vllm", "serve", "{model}", "-q"], ""),
        ("sglang", ["p", "--model-path", "/m", "--admin-api-key=k"], ["p", "--model-path", "{model}"], "/m"),
    ],
)
def test_command_becomes_the_launchers(engine: str, words: list[str], kept: list[str], model: str) -> None:
    found = read(words, engine, where="here")
    assert (list(found.words), found.model) == (kept, model)


def test_the_engines_own_python_starts_the_launcher() -> None:
    found = read(["/opt/p/bin/python3.12", "-m", "sglang.launch_server", "--model=/m"], "sglang", where="here")
    assert found.python == "/opt/p/bin/python3.12"


_SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
_NAMES = st.sampled_from("abcdef")
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4), max_leaves=12
)


@given(old=st.dictionaries(_NAMES, _VALUES, min_size=1), new=st.dictionaries(_NAMES, _VALUES, min_size=1), more=_VALUES)
def test_a_changed_document_says_what_it_must(old: dict[str, Any], new: dict[str, Any], more: Any) -> None:
    text = yaml.safe_dump_all([more, old, more], sort_keys=False, allow_unicode=True)
    things = [thing for thing in yaml.safe_load_all(spliced(text, 1, new)) if thing is not None]
    assert things == [thing for thing in (more, new, more) if thing is not None]


@given(old=st.dictionaries(_NAMES, _VALUES, min_size=2), name=_NAMES, value=_VALUES)
def test_comments_of_what_did_not_change_stay(old: dict[str, Any], name: str, value: Any) -> None:
    parts = [f"# about {key}\n{yaml.safe_dump({key: item}, allow_unicode=True)}" for key, item in old.items()]
    printed = spliced("".join(parts), 0, {**old, name: value})
    for key, part in zip(old, parts, strict=True):
        assert f"# about {key}\n" in printed
        assert key == name or part.rstrip("\n") in printed
