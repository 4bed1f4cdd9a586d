"""The programs understand the command lines that the charts give them."""

from pathlib import Path

import pytest
import typer.main
import yaml

from modelswap_engine.backends import drain, launch
from modelswap_engine.backends.external.command import compose
from modelswap_engine.backends.external.handshake import Boot
from modelswap_engine.cli.main import app
from modelswap_operator.runtime.settings import parse
from tests.support.charts import Charts, ci_values, containers, pod_templates


def kind_of(values: Path) -> str:
    found: str = yaml.safe_load(values.read_text()).get("engine", {}).get("kind", "embedded")
    return found


EXTERNAL = {path: kind for path in ci_values("modelswap-engine") if (kind := kind_of(path)) != "embedded"}


@pytest.mark.parametrize("values", ci_values("modelswap-engine"), ids=lambda path: path.stem)
def test_engine_understands_its_arguments(charts: Charts, values: Path) -> None:
    (template,) = pod_templates(charts.template("modelswap-engine", values))
    (container,) = [c for c in containers(template["spec"]) if c["args"][0] in ("serve", "proxy")]
    name, *options = container["args"]
    assert (name == "proxy") == (values in EXTERNAL)
    parsed = typer.main.get_group(app).commands[name].make_context(name, list(options)).params
    assert f"--model={parsed['model']}" in options
    assert parsed["auth"] == "kubernetes"
    assert parsed["allowed_subject"]


@pytest.mark.parametrize("values", EXTERNAL, ids=lambda path: path.stem)
def test_launcher_and_hook_understand_theirs(charts: Charts, values: Path) -> None:
    (template,) = pod_templates(charts.template("modelswap-engine", values))
    container = template["spec"]["containers"][0]
    options = launch.parser().parse_args([*container["command"][3:], *container["args"]])
    assert options.engine == EXTERNAL[values]
    assert options.command[-len(container["args"]) :] == container["args"]
    boot = Boot(boot_id="b", admin_key="k", engine=options.engine, port=options.port, digest="d")
    assert "{model}" not in str(compose(container["args"], launch.ENGINES[boot.engine], model="/m", boot=boot))
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == container["command"][:2]
    drained = drain.parser().parse_args(hook[3:])
    assert (drained.control_port, drained.runtime_dir) == (8001, options.runtime_dir)
    files = template["spec"]["initContainers"][0]
    name, *rest = files["args"]
    parsed = typer.main.get_group(app).commands[name].make_context(name, list(rest)).params
    assert str(parsed["directory"]) in {mount["mountPath"] for mount in files["volumeMounts"]}


@pytest.mark.parametrize("values", ci_values("modelswap"), ids=lambda path: path.stem)
def test_operator_understands_its_arguments(charts: Charts, values: Path) -> None:
    (template,) = pod_templates(charts.template("modelswap", values))
    container = template["spec"]["containers"][0]
    environment = {variable["name"]: variable["name"] for variable in container["env"]}
    settings = parse(container["args"], environment)
    wanted = yaml.safe_load(values.read_text())
    assert settings.namespaces == tuple(wanted.get("watch", {}).get("namespaces", ()))
    assert settings.leader_elect == wanted.get("leaderElection", {}).get("enabled", True)
    assert (settings.pod_namespace, settings.pod_name) == ("POD_NAMESPACE", "POD_NAME")
    assert settings.service_account == "SERVICE_ACCOUNT"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.http_port == ports["http"]
