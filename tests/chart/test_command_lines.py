"""The programs understand the command lines that the charts give them."""

from pathlib import Path

import pytest
import typer.main
import yaml

from modelswap_engine.cli.main import app
from modelswap_operator.runtime.settings import parse
from tests.support.charts import Charts, ci_values, pod_templates


@pytest.mark.parametrize("values", ci_values("modelswap-engine"), ids=lambda path: path.stem)
def test_engine_understands_its_arguments(charts: Charts, values: Path) -> None:
    (template,) = pod_templates(charts.template("modelswap-engine", values))
    container = template["spec"]["containers"][0]
    name, *options = container["args"]
    commands = typer.main.get_group(app).commands
    parsed = commands[name].make_context(name, list(options)).params
    assert str(parsed["model"]) == options[0].removeprefix("--model=")
    assert parsed["auth"] == "kubernetes"
    assert parsed["allowed_subject"]


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
