"""A value that a chart does not know, or that cannot be right, stops the installation.

Helm is asked once whether it obeys the schema; the many cases are asked of the schema itself.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.charts import CHARTS, NAMES, Charts
from tests.support.custom import merged

FREE_FORM = {"global"}
NEEDED: dict[str, dict[str, Any]] = {"modelswap": {}, "modelswap-engine": {"model": {"path": "/models/m"}}}


def schema(chart: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHARTS / chart / "values.schema.json").read_text())
    return found


def closed_maps(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if "properties" in node:
        yield path
        for name, child in node["properties"].items():
            yield from closed_maps(child, (*path, name))


def nested(path: tuple[str, ...], leaf: Any) -> Any:
    for name in reversed(path):
        leaf = {name: leaf}
    return leaf


def defaults(chart: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHARTS / chart / "values.yaml").read_text())
    return found


def refusals(chart: str, values: dict[str, Any]) -> list[str]:
    """What the schema says of values over the chart's defaults, each as path and message."""
    checker = jsonschema.Draft7Validator(schema(chart))
    found = checker.iter_errors(merged(defaults(chart), values))
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


@pytest.mark.parametrize("chart", NAMES)
def test_schema_is_a_schema_and_defaults_fit(chart: str) -> None:
    jsonschema.Draft7Validator.check_schema(schema(chart))
    assert refusals(chart, {}) == []


@pytest.mark.parametrize("chart", NAMES)
def test_helm_obeys_the_schema(charts: Charts, chart: str) -> None:
    done = charts.try_template(chart, NEEDED[chart] | {"image": {"misspelled": True}})
    assert done.returncode != 0
    assert "misspelled" in done.stderr


@pytest.mark.parametrize("chart", NAMES)
def test_every_level_is_closed(chart: str) -> None:
    def check(node: dict[str, Any], path: str) -> None:
        if "properties" in node:
            assert node.get("additionalProperties") is False, path
            for name, child in node["properties"].items():
                check(child, f"{path}.{name}")

    check(schema(chart), chart)


@pytest.mark.parametrize("chart", NAMES)
def test_schema_and_defaults_name_the_same_values(chart: str) -> None:
    def compare(node: dict[str, Any], value: Any, path: str) -> None:
        if "properties" in node:
            assert node["properties"].keys() - FREE_FORM == value.keys(), path
            for name, child in value.items():
                compare(node["properties"][name], child, f"{path}.{name}")

    compare(schema(chart), defaults(chart), chart)


@pytest.mark.parametrize(
    ("chart", "path"), [(chart, path) for chart in NAMES for path in closed_maps(schema(chart))], ids=str
)
def test_unknown_value_is_refused(chart: str, path: tuple[str, ...]) -> None:
    (refusal,) = refusals(chart, nested(path, {"misspelled": True}))
    assert refusal.startswith(f"{'.'.join(path)}: ")
    assert "'misspelled' was unexpected" in refusal


@pytest.mark.parametrize(
    ("chart", "path", "value"),
    [
        ("modelswap", ("replicas",), "2"),
        ("modelswap", ("replicas",), -1),
        ("modelswap", ("image", "digest"), "sha256:abc"),
        ("modelswap", ("image", "pullPolicy"), "Sometimes"),
        ("modelswap", ("watch", "namespaces"), ["Not_A_Namespace"]),
        ("modelswap", ("watch", "namespaces"), ["a", "a"]),
        ("modelswap", ("logging", "level"), "loud"),
        ("modelswap", ("engine", "controlPort"), 0),
        ("modelswap-engine", ("slot",), "Has Spaces"),
        ("modelswap-engine", ("slot",), "a" * 64),
        ("modelswap-engine", ("model", "path"), "relative"),
        ("modelswap-engine", ("model", "version"), 1.0),
        ("modelswap-engine", ("allowedRoots",), ["relative"]),
        ("modelswap-engine", ("drainSeconds",), 0),
        ("modelswap-engine", ("engine", "kind"), "tgi"),
        ("modelswap-engine", ("engine", "port"), 8001),
        ("modelswap-engine", ("engine", "restart"), "Sometimes"),
        ("modelswap-engine", ("engine", "checkpoints", "sizeLimit"), "3 GiB"),
        ("modelswap-engine", ("trainer", "serviceAccounts"), ["no-namespace"]),
        ("modelswap-engine", ("trainer", "peers"), ["trainer.example"]),
        ("modelswap-engine", ("trainer", "weightLoaders"), ["module"]),
        ("modelswap-engine", ("service", "type"), "Elsewhere"),
        ("modelswap-engine", ("command",), []),
        ("modelswap-engine", ("securityContext", "runAsUser"), 0),
        ("modelswap-engine", ("modelVersion", "digest"), "md5:00"),
    ],
    ids=str,
)
def test_value_that_cannot_be_right_is_refused(chart: str, path: tuple[str, ...], value: Any) -> None:
    (refusal,) = refusals(chart, nested(path, value))
    assert refusal.startswith(".".join(path))
