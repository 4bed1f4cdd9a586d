"""Pods meet Pod Security "restricted" without a server to say so; test_on_api_server.py lets a real one judge."""

from pathlib import Path

import pytest

from tests.support.charts import Charts, Object, case_id, cases, containers, pod_templates

RESTRICTED_VOLUMES = {
    "configMap",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
GIVEN_BY_THE_USER = {"hostPath", "nfs"}

every_case = pytest.mark.parametrize(("chart", "values"), cases(), ids=case_id)


def specs(charts: Charts, chart: str, values: Path) -> list[Object]:
    found = [template["spec"] for template in pod_templates(charts.template(chart, values))]
    assert found
    return found


@every_case
def test_containers_have_no_privilege(charts: Charts, chart: str, values: Path) -> None:
    for spec in specs(charts, chart, values):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in containers(spec):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container.get("ports", []))


@every_case
def test_volumes_are_of_restricted_kinds_but_where_the_user_named_another(
    charts: Charts, chart: str, values: Path
) -> None:
    for spec in specs(charts, chart, values):
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        beyond = kinds - RESTRICTED_VOLUMES
        assert beyond <= GIVEN_BY_THE_USER
        assert all(kind in values.read_text() for kind in beyond)


@every_case
def test_memory_is_bounded(charts: Charts, chart: str, values: Path) -> None:
    for spec in specs(charts, chart, values):
        for container in containers(spec):
            assert "memory" in container["resources"]["limits"]
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
