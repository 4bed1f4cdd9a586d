"""The programs understand the command lines that the charts give them."""

from pathlib import Path

import pytest
import typer.main

from modelswap_engine.cli.main import app
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
