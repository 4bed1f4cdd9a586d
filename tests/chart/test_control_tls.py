"""TLS on the control port, as the charts install it on both sides."""

from typing import Any

import pytest

from modelswap_operator.effects.trust import ControlTls
from modelswap_operator.runtime.settings import parse
from tests.support.charts import CHARTS, Charts, Object, of_kind, one, pod_templates

ENGINE, OPERATOR = "modelswap-engine", "modelswap"
CERT_MANAGER = CHARTS / ENGINE / "ci" / "control-tls-values.yaml"
EXTERNAL = CHARTS / ENGINE / "ci" / "vllm-values.yaml"


def sidecar(objects: list[Object]) -> Object:
    """Return the container that has the control port."""
    spec = next(pod_templates(objects))["spec"]
    (found,) = [
        c
        for c in [*spec.get("initContainers", []), *spec["containers"]]
        if any(port["containerPort"] == 8001 for port in c.get("ports", []))
    ]
    return dict(found)


def secret(objects: list[Object]) -> Object:
    volumes = next(pod_templates(objects))["spec"]["volumes"]
    return dict(next(volume["secret"] for volume in volumes if volume["name"] == "control-tls"))


@pytest.mark.parametrize("values", [CERT_MANAGER, EXTERNAL], ids=["embedded", "external"])
def test_port_probes_files_and_metrics_say_the_same(charts: Charts, values: Any) -> None:
    objects = charts.template(ENGINE, values, namespace="team")
    container = sidecar(objects)
    assert [port["name"] for port in container["ports"]] == ["http", "modelswap-tls"]
    for name in ("startup", "readiness", "liveness"):
        probe = container[f"{name}Probe"]["httpGet"]
        assert (probe["port"], probe["scheme"]) == ("modelswap-tls", "HTTPS")
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "control-tls"]
    assert mount == {"name": "control-tls", "mountPath": "/etc/modelswap/tls", "readOnly": True}  # no subPath: renewed
    assert {
        f"--control-tls-{'cert' if end == 'crt' else 'key'}=/etc/modelswap/tls/tls.{end}" for end in ("crt", "key")
    } <= {*container["args"]}
    assert [item["key"] for item in secret(objects)["items"]] == ["tls.crt", "tls.key"]
    (endpoint,) = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("modelswap-tls", "https")
    assert endpoint["tlsConfig"] == {
        "serverName": "modelswap-control.team.svc",
        "ca": {"secret": {"name": secret(objects)["secretName"], "key": "ca.crt"}},
    }
    assert one(objects, "NetworkPolicy")["spec"]["ingress"][1]["ports"] == [{"port": 8001, "protocol": "TCP"}]


def test_the_engines_own_container_asks_with_tls(charts: Charts) -> None:
    (container,) = next(pod_templates(charts.template(ENGINE, EXTERNAL)))["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/engine-livez", "port": 8001, "scheme": "HTTPS"}
    assert "--tls" in container["lifecycle"]["preStop"]["exec"]["command"]
    assert not any(mount["name"] == "control-tls" for mount in container["volumeMounts"])


def test_cert_manager_is_asked_for_the_name_that_the_operator_asks_for(charts: Charts) -> None:
    objects = charts.template(ENGINE, CERT_MANAGER, namespace="team")
    certificate = one(objects, "Certificate")["spec"]
    assert certificate["secretName"] == secret(objects)["secretName"]
    assert certificate["issuerRef"] == {"name": "modelswap-ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    values = {"controlTls": {"mode": "Required", "ca": {"configMap": "ca"}}}
    (template,) = pod_templates(charts.template(OPERATOR, values))
    settings = parse(template["spec"]["containers"][0]["args"], {})
    assert settings.control_tls is ControlTls.REQUIRED
    assert certificate["dnsNames"] == [settings.control_server_name.replace("{namespace}", "team")]
    assert not of_kind(charts.template(ENGINE, EXTERNAL), "Certificate")


def test_the_operator_mounts_the_authorities_and_reads_no_secret(charts: Charts) -> None:
    for ca, source in (
        ({"configMap": "bundle"}, {"configMap": {"name": "bundle", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}),
        (
            {"secret": "pair", "key": "root.pem"},
            {"secret": {"secretName": "pair", "items": [{"key": "root.pem", "path": "ca.crt"}]}},
        ),
    ):
        objects = charts.template(OPERATOR, {"controlTls": {"mode": "Optional", "ca": ca}})
        (template,) = pod_templates(objects)
        volume = next(v for v in template["spec"]["volumes"] if v["name"] == "control-ca")
        assert volume == {"name": "control-ca", **source}
        (container,) = template["spec"]["containers"]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "control-ca"]
        file = str(parse(container["args"], {}).control_ca_file)
        assert file == f"{mount['mountPath']}/ca.crt"
        assert "subPath" not in mount
        rules = [
            rule for role in (*of_kind(objects, "Role"), *of_kind(objects, "ClusterRole")) for rule in role["rules"]
        ]
        assert not any("secrets" in rule["resources"] for rule in rules)


@pytest.mark.parametrize(
    ("chart", "values", "says"),
    [
        (ENGINE, {"enabled": True}, "needs secretName"),
        (ENGINE, {"enabled": True, "secretName": "s", "certManager": {"issuerRef": {"name": "i"}}}, "not both"),
        (OPERATOR, {"mode": "Required"}, "set one of"),
        (OPERATOR, {"mode": "Optional", "ca": {"configMap": "a", "secret": "b"}}, "set one of"),
        (OPERATOR, {"mode": "Off"}, "mode"),
        (OPERATOR, {"mode": False}, "mode"),  # what YAML makes of off
    ],
)
def test_what_contradicts_itself_is_refused(charts: Charts, chart: str, values: dict[str, Any], says: str) -> None:
    done = charts.try_template(
        chart, {"model": {"path": "/models/m"}, "controlTls": values} if chart == ENGINE else {"controlTls": values}
    )
    assert done.returncode != 0
    assert says in done.stderr


def test_without_it_nothing_is_different(charts: Charts) -> None:
    container = sidecar(charts.template(ENGINE, {"model": {"path": "/models/m"}}))
    assert container["ports"][1]["name"] == "modelswap"
    assert "scheme" not in container["readinessProbe"]["httpGet"]
    assert not any("tls" in argument for argument in container["args"])
    (template,) = pod_templates(charts.template(OPERATOR))
    assert parse(template["spec"]["containers"][0]["args"], {}).control_tls is ControlTls.DISABLED
