"""Every value set of a chart's ci folder renders to sound objects."""

from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.cache import REPOSITORY
from tests.support.charts import Charts, Object, case_id, cases, of_kind, pod_templates

# Newest first: what the API server of a supported release would accept.
KUBERNETES_VERSIONS = ("1.36", "1.31")
FOREIGN_GROUPS = ("modelswap.dev", "monitoring.coreos.com", "cert-manager.io")
CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
STANDARD_LABELS = {
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/component",
    "app.kubernetes.io/version",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
}

every_case = pytest.mark.parametrize(("chart", "values"), cases(), ids=case_id)


def definition(kind: str) -> dict[str, Any]:
    for path in (REPOSITORY / "crds").glob("modelswap.dev_*.yaml"):
        found = yaml.safe_load(path.read_text())
        if found["spec"]["names"]["kind"] == kind:
            schema: dict[str, Any] = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            return schema
    raise AssertionError(f"no definition of {kind}")


@every_case
def test_lint_finds_nothing(charts: Charts, chart: str, values: Path) -> None:
    done = charts.lint(chart, values)
    assert done.returncode == 0, done.stdout + done.stderr


@every_case
def test_objects_fit_their_schemas(charts: Charts, chart: str, values: Path) -> None:
    for found in charts.template(chart, values):
        group = found["apiVersion"].rpartition("/")[0]
        if group == "modelswap.dev":
            jsonschema.validate(found, definition(found["kind"]))
        elif group not in FOREIGN_GROUPS:
            for version in KUBERNETES_VERSIONS:
                kubernetes_validate.validate(found, version, strict=True)


@every_case
def test_every_object_says_where_it_belongs(charts: Charts, chart: str, values: Path) -> None:
    objects = charts.template(chart, values, namespace="somewhere")
    assert objects
    for found in objects:
        where = found["metadata"].get("namespace")
        assert (where is None) == (found["kind"] in CLUSTER_WIDE), f"{found['kind']} {found['metadata']['name']}"
        assert found["metadata"]["labels"].keys() >= STANDARD_LABELS, found["kind"]
    names = Counter((o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects)
    assert names.most_common(1)[0][1] == 1


@every_case
def test_selectors_find_the_pods_and_only_name_what_never_changes(charts: Charts, chart: str, values: Path) -> None:
    objects = charts.template(chart, values)
    labels = next(pod_templates(objects))["metadata"]["labels"]
    for selector in selectors(objects):
        assert selector.items() <= labels.items()
        assert selector.keys() == {
            "app.kubernetes.io/name",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/component",
        }


def selectors(objects: list[Object]) -> list[dict[str, str]]:
    found = [o["spec"]["selector"] for o in of_kind(objects, "Service")]
    for kind in ("Deployment", "PodDisruptionBudget", "ServiceMonitor", "PodMonitor"):
        found += [o["spec"]["selector"]["matchLabels"] for o in of_kind(objects, kind)]
    found += [o["spec"]["podSelector"]["matchLabels"] for o in of_kind(objects, "NetworkPolicy")]
    for template in pod_templates(objects):
        found += [c["labelSelector"]["matchLabels"] for c in template["spec"]["topologySpreadConstraints"]]
    return found


@every_case
def test_no_secret_is_made(charts: Charts, chart: str, values: Path) -> None:
    assert not of_kind(charts.template(chart, values), "Secret")


@every_case
def test_rendering_twice_gives_the_same(charts: Charts, chart: str, values: Path) -> None:
    # A random or dated value would make GitOps tools see a change for ever.
    text = values.read_text()
    first, second = (charts.template_anew(chart, text, release="demo", namespace="serving") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


@every_case
def test_pod_disruption_budgets_come_with_a_second_replica(charts: Charts, chart: str, values: Path) -> None:
    objects = charts.template(chart, values)
    replicas = of_kind(objects, "Deployment")[0]["spec"]["replicas"]
    assert len(of_kind(objects, "PodDisruptionBudget")) == (1 if replicas > 1 else 0)
