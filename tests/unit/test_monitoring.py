"""Alerts and dashboards speak of metrics that exist, and each alert of a runbook that does."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cache import REPOSITORY
from tests.support.tools import promtool

CONTRIB = REPOSITORY / "contrib"
NAME = re.compile(r"\bmodelswap_[a-z_]+")
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.MULTILINE)
BUILT = ("_bucket", "_sum", "_count")


def exposed() -> set[str]:
    """Every name of a series that operator and engines can show, as the page says that is generated from their code."""
    found: set[str] = set()
    for name, kind in ROW.findall((REPOSITORY / "docs" / "reference" / "metrics.md").read_text()):
        found |= {f"{name}{end}" for end in BUILT} if kind == "histogram" else {name}
    return found


RULES = yaml.safe_load((CONTRIB / "prometheus" / "rules.yaml").read_text())
ALERTS: list[dict[str, Any]] = [rule for group in RULES["spec"]["groups"] for rule in group["rules"]]
RULE_TESTS = yaml.safe_load((CONTRIB / "prometheus" / "rules.test.yaml").read_text())["tests"]
BOARD = json.loads((CONTRIB / "grafana" / "modelswap.json").read_text())


def expressions() -> Iterator[tuple[str, str]]:
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_series_exists(where: str, expression: str) -> None:
    names = set(NAME.findall(expression))
    assert names, where
    assert names <= exposed(), names - exposed()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_has_a_runbook_a_severity_and_a_line_for_people(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^## (.+)$", (REPOSITORY / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert rule["annotations"]["summary"]


def test_no_runbook_is_for_an_alert_that_is_gone() -> None:
    headings = re.findall(r"^## (.+)$", (REPOSITORY / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in ALERTS]


def test_panels_do_not_cover_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_each_alert_is_tried_where_it_must_fire_and_where_it_must_not() -> None:
    tried = {case["alertname"]: [] for test in RULE_TESTS for case in test["alert_rule_test"]}
    for test in RULE_TESTS:
        for case in test["alert_rule_test"]:
            tried[case["alertname"]].append(bool(case["exp_alerts"]))
    assert tried == {rule["alert"]: [False, True] for rule in ALERTS}


@pytest.mark.full
@pytest.mark.timeout(1800)  # promtool is built where the cache lacks it
def test_prometheus_takes_the_rules_and_they_say_what_they_must(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(RULES["spec"]))
    shutil.copy(CONTRIB / "prometheus" / "rules.test.yaml", tmp_path)
    for command in (
        ["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"],
        ["test", "rules", "rules.test.yaml"],
    ):
        done = subprocess.run([promtool(), *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
