"""The engine's chart: what makes a pod a pod of its slot, and who reaches which port."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.charts import CHARTS, Charts, Object, of_kind, one, pod_templates

CHART = "modelswap-engine"
MINIMAL = {"model": {"path": "/models/m"}, "models": {"persistentVolumeClaim": {"claimName": "models"}}}


def with_minimal(**values: Any) -> dict[str, Any]:
    return {**MINIMAL, **values}


def engine(objects: list[Object]) -> Object:
    found: Object = next(pod_templates(objects))["spec"]["containers"][0]
    return found


def flag(container: Object, name: str) -> list[str]:
    return [a.partition("=")[2] for a in container["args"] if a.partition("=")[0] == f"--{name}"]


def volumes(objects: list[Object]) -> dict[str, Object]:
    return {volume["name"]: volume for volume in next(pod_templates(objects))["spec"]["volumes"]}


def mounts(container: Object) -> dict[str, Object]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


def test_slot_names_label_assignment_and_model(charts: Charts) -> None:
    objects = charts.template(CHART, with_minimal(slot="chat"))
    template = next(pod_templates(objects))
    assert template["metadata"]["labels"]["modelswap.dev/slot"] == "chat"
    assert volumes(objects)["assignment"]["configMap"] == {"name": "modelswap-chat", "optional": True}
    container = engine(objects)
    assert mounts(container)["/etc/modelswap/assignment"]["readOnly"] is True
    assert "subPath" not in mounts(container)["/etc/modelswap/assignment"]  # a subPath would never see an update
    assert flag(container, "assignment-dir") == ["/etc/modelswap/assignment"]
    assert flag(container, "served-model-name") == ["chat"]


def test_slot_and_name_default_to_the_release(charts: Charts) -> None:
    objects = charts.template(CHART, MINIMAL, release="smollm2")
    assert next(pod_templates(objects))["metadata"]["labels"]["modelswap.dev/slot"] == "smollm2"
    assert flag(engine(objects), "served-model-name") == ["smollm2"]


def test_only_the_operators_account_is_allowed(charts: Charts) -> None:
    objects = charts.template(CHART, with_minimal(operator={"namespace": "ops", "serviceAccount": "swapper"}))
    container = engine(objects)
    assert flag(container, "auth") == ["kubernetes"]
    assert flag(container, "allowed-subject") == ["system:serviceaccount:ops:swapper"]
    uid = next(variable for variable in container["env"] if variable["name"] == "MODELSWAP_POD_UID")
    assert uid["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.uid"}}


def test_token_is_projected_and_short_lived(charts: Charts) -> None:
    objects = charts.template(CHART, MINIMAL)
    spec = next(pod_templates(objects))["spec"]
    assert spec["automountServiceAccountToken"] is False
    sources = volumes(objects)["token"]["projected"]["sources"]
    assert sources[0] == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    assert mounts(engine(objects))["/var/run/secrets/kubernetes.io/serviceaccount"]["readOnly"] is True
    assert not of_kind(objects, "Role")
    assert not of_kind(objects, "ClusterRole")


def test_ports_and_probes(charts: Charts) -> None:
    container = engine(charts.template(CHART, MINIMAL))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "modelswap": 8001}
    assert flag(container, "port") == ["8000"]
    assert flag(container, "control-port") == ["8001"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in paths} == {"modelswap"}
    assert container["readinessProbe"]["periodSeconds"] == 1
    assert container["readinessProbe"]["failureThreshold"] == 1


def test_grace_period_outlasts_the_drain(charts: Charts) -> None:
    objects = charts.template(CHART, with_minimal(drainSeconds=100))
    assert flag(engine(objects), "drain-seconds") == ["100"]
    assert next(pod_templates(objects))["spec"]["terminationGracePeriodSeconds"] == 115


def test_replacing_pods_never_lowers_their_number(charts: Charts) -> None:
    strategy = one(charts.template(CHART, MINIMAL), "Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@pytest.mark.parametrize(
    ("models", "volume"),
    [
        ({"hostPath": {"path": "/srv"}}, {"hostPath": {"path": "/srv", "type": "Directory"}}),
        (
            {"persistentVolumeClaim": {"claimName": "c"}},
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
        ),
        ({"volume": {"nfs": {"server": "s", "path": "/"}}}, {"nfs": {"server": "s", "path": "/"}}),
    ],
)
def test_models_volume_is_mounted_read_only_and_allowed(
    charts: Charts, models: dict[str, Any], volume: dict[str, Any]
) -> None:
    objects = charts.template(CHART, {"model": {"path": "/m/one"}, "models": {**models, "mountPath": "/m"}})
    assert volumes(objects)["models"] == {"name": "models", **volume}
    assert mounts(engine(objects))["/m"] == {"name": "models", "mountPath": "/m", "readOnly": True}
    assert flag(engine(objects), "allow-root") == ["/m"]


def test_without_a_models_volume_only_the_model_itself_is_allowed(charts: Charts) -> None:
    objects = charts.template(CHART, {"model": {"path": "/opt/model"}})
    assert "models" not in volumes(objects)
    assert flag(engine(objects), "allow-root") == []


def test_named_roots_replace_the_default(charts: Charts) -> None:
    objects = charts.template(CHART, with_minimal(allowedRoots=["/a", "/b"]))
    assert flag(engine(objects), "allow-root") == ["/a", "/b"]


def test_state_and_tmp_are_bounded(charts: Charts) -> None:
    found = volumes(charts.template(CHART, MINIMAL))
    assert found["state"]["emptyDir"] == {"sizeLimit": "2Gi"}
    assert found["tmp"]["emptyDir"] == {"sizeLimit": "256Mi"}


def test_engine_settings_reach_the_command_line(charts: Charts) -> None:
    settings = {"kvCache": {"blocks": 1048576, "pageSize": 32}, "maxQueue": 2000000, "maxBatchTokens": 8192}
    container = engine(charts.template(CHART, with_minimal(**settings)))
    assert flag(container, "kv-blocks") == ["1048576"]
    assert flag(container, "page-size") == ["32"]
    assert flag(container, "max-queue") == ["2000000"]
    assert flag(container, "max-batch-tokens") == ["8192"]
    assert flag(engine(charts.template(CHART, with_minimal(device="cuda"))), "device") == ["cuda"]
    plain = engine(charts.template(CHART, MINIMAL))
    assert flag(plain, "device") == ["auto"]
    assert not any(flag(plain, name) for name in ("kv-blocks", "page-size", "max-queue", "max-batch-tokens"))


def test_python_environment_of_the_node(charts: Charts) -> None:
    objects = charts.template(CHART, CHARTS / CHART / "ci" / "host-path-values.yaml")
    container = engine(objects)
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in container["env"]
    assert mounts(container)["/opt/modelswap/site"]["readOnly"] is True
    assert volumes(objects)["site"]["hostPath"]["path"] == "/opt/modelswap/site"
    assert one(objects, "Service")["spec"]["ports"][0]["nodePort"] == 30080


def test_network_policy_admits_only_the_operator_to_the_control_port(charts: Charts) -> None:
    values = with_minimal(operator={"namespace": "ops", "name": "swapper"})
    policy = one(charts.template(CHART, values), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    data, control = policy["ingress"]
    assert data == {"ports": [{"port": "http", "protocol": "TCP"}]}
    assert control["ports"] == [{"port": 8001, "protocol": "TCP"}]
    assert control["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ops"}},
            "podSelector": {
                "matchLabels": {"app.kubernetes.io/name": "swapper", "app.kubernetes.io/component": "operator"}
            },
        }
    ]


def test_network_policy_names_the_labels_of_the_operators_pods(charts: Charts) -> None:
    operator = next(pod_templates(charts.template("modelswap", namespace="modelswap-system")))
    policy = one(charts.template(CHART, MINIMAL), "NetworkPolicy")["spec"]
    wanted = policy["ingress"][1]["from"][0]["podSelector"]["matchLabels"]
    assert wanted.items() <= operator["metadata"]["labels"].items()


def test_default_subject_is_the_account_of_a_default_operator(charts: Charts) -> None:
    account = one(charts.template("modelswap", release="modelswap", namespace="modelswap-system"), "ServiceAccount")
    assert flag(engine(charts.template(CHART, MINIMAL)), "allowed-subject") == [
        f"system:serviceaccount:modelswap-system:{account['metadata']['name']}"
    ]


def test_a_trainer_is_let_in_on_request(charts: Charts) -> None:
    objects = charts.template(CHART, CHARTS / CHART / "ci" / "claim-values.yaml")
    container = engine(objects)
    assert flag(container, "allowed-subject")[1:] == ["system:serviceaccount:training:grpo"]
    assert flag(container, "weight-peer") == ["10.244.0.0/16", "fd00::/64"]
    assert flag(container, "export-root") == ["/models/trained"]
    assert flag(container, "weight-loader") == ["acme.loaders:renamed"]
    admitted = one(objects, "NetworkPolicy")["spec"]["ingress"][1]["from"]
    assert admitted[1:] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "training"}}}]
    plain = engine(charts.template(CHART, MINIMAL))
    assert not any(flag(plain, name) for name in ("weight-peer", "export-root", "weight-loader"))


def test_model_version_is_rendered_on_request(charts: Charts) -> None:
    assert not of_kind(charts.template(CHART, MINIMAL), "ModelVersion")
    values = {"model": {"path": "/models/m", "version": "1.0"}, "slot": "chat", "servedModelName": "acme/chat"}
    plain = one(charts.template(CHART, {**values, "modelVersion": {"create": True}}), "ModelVersion")
    assert plain["metadata"]["name"] == "chat"
    assert plain["spec"] == {"servedModelName": "acme/chat", "version": "1.0", "source": {"uri": "file:///models/m"}}
    full = one(charts.template(CHART, CHARTS / CHART / "ci" / "claim-values.yaml"), "ModelVersion")
    assert full["spec"]["version"] == "1.1"
    assert full["spec"]["traffic"] == {"mode": "Recompute"}
    assert full["spec"]["source"]["digest"].startswith("sha256:")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "model.path is required"),
        (with_minimal(models={"hostPath": {"path": "/a"}, "volume": {"nfs": {}}}), "at most one of"),
        (with_minimal(modelVersion={"create": True}), "modelVersion.version or model.version is required"),
        (
            with_minimal(modelVersion={"create": True, "version": "1", "spec": {"version": "2"}}),
            "modelVersion.spec.version: set the value of that name",
        ),
        (with_minimal(serviceAccount={"create": False}), "serviceAccount.name is required"),
    ],
)
def test_values_that_cannot_work_are_refused(charts: Charts, values: dict[str, Any], word: str) -> None:
    done = charts.try_template(CHART, values)
    assert done.returncode != 0
    assert word in done.stderr


def test_example_values_render(charts: Charts, tmp_path: Path) -> None:
    examples = CHARTS.parent / "examples"
    assert charts.template(CHART, examples / "engine-values.yaml")
    assert charts.template("modelswap", examples / "operator-values.yaml")


SOURCES: Object = {
    "allow": ["s3://b/m"],
    "credentials": [{"name": "reader", "secretName": "s3", "prefixes": ["s3://b"]}],
    "claims": ["more"],
    "store": {"sizeLimit": "40Gi"},
}


def test_what_may_be_fetched_and_with_what_is_told_and_mounted(charts: Charts) -> None:
    objects = charts.template(CHART, with_minimal(sources=SOURCES))
    container, found = engine(objects), volumes(objects)
    assert flag(container, "allow-source") == ["s3://b/m"]
    assert "--allow-private-redirects" not in container["args"]
    assert flag(container, "claim") == ["more=/claims/more"]
    assert [a for a in container["args"] if a.startswith("--source-credentials")] == [
        "--source-credentials=reader=s3://b"
    ]
    assert flag(container, "store-size") == ["40Gi"]
    by_path = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert found[by_path["/var/lib/modelswap-store"]["name"]]["emptyDir"] == {"sizeLimit": "40Gi"}
    secret = found[by_path[f"{flag(container, 'credentials-dir')[0]}/reader"]["name"]]["secret"]
    assert (secret["secretName"], secret["defaultMode"]) == ("s3", 0o440)
    claim = by_path["/claims/more"]
    assert claim["readOnly"]
    assert found[claim["name"]]["persistentVolumeClaim"] == {"claimName": "more", "readOnly": True}


def test_without_sources_nothing_can_be_fetched_and_nothing_is_mounted(charts: Charts) -> None:
    objects = charts.template(CHART, MINIMAL)
    container = engine(objects)
    assert not [a for a in container["args"] if a.startswith(("--allow-source", "--store", "--credentials"))]
    assert "store" not in volumes(objects)


def test_who_trusts_sources_with_the_network_says_so(charts: Charts) -> None:
    container = engine(charts.template(CHART, with_minimal(sources=SOURCES | {"allowPrivateRedirects": True})))
    assert "--allow-private-redirects" in container["args"]


def test_a_place_to_fetch_from_needs_room_to_fetch_to(charts: Charts) -> None:
    refused = charts.try_template(CHART, with_minimal(sources={"allow": ["s3://b/m"]})).stderr
    assert "sources.store.sizeLimit is required with sources.allow" in refused


def test_pods_of_a_node_share_a_folder_only_where_it_is_named(charts: Charts) -> None:
    store = {"sizeLimit": "40Gi", "hostPath": {"path": "/var/lib/modelswap"}}
    objects = charts.template(CHART, with_minimal(sources=SOURCES | {"store": store}))
    assert "--store-shared" in engine(objects)["args"]
    assert flag(engine(objects), "store-size") == ["40Gi"]
    assert volumes(objects)["store"]["hostPath"] == {"path": "/var/lib/modelswap", "type": "Directory"}
    assert "--store-shared" not in engine(charts.template(CHART, with_minimal(sources=SOURCES)))["args"]


def test_the_path_of_a_folder_is_text_whatever_it_looks_like(charts: Charts) -> None:
    store = {"sizeLimit": "40Gi", "hostPath": {"path": "/a:#b"}}
    objects = charts.template(CHART, with_minimal(sources=SOURCES | {"store": store}))
    assert volumes(objects)["store"]["hostPath"]["path"] == "/a:#b"
    store = {"sizeLimit": "40Gi", "hostPath": {"path": "/a:"}}
    objects = charts.template(CHART, with_minimal(sources=SOURCES | {"store": store}))
    assert volumes(objects)["store"]["hostPath"]["path"] == "/a:"


def test_no_folder_of_the_node_can_be_said_by_null(charts: Charts) -> None:
    objects = charts.template(CHART, with_minimal(sources=SOURCES | {"store": {"sizeLimit": "40Gi", "hostPath": None}}))
    assert "--store-shared" not in engine(objects)["args"]
    assert "emptyDir" in volumes(objects)["store"]


@pytest.mark.parametrize(
    ("sources", "word"),
    [
        (
            {**SOURCES, "store": {"sizeLimit": "1Gi", "hostPath": {"path": "/a"}, "volume": {"nfs": {}}}},
            "/store/volume",
        ),
        ({**SOURCES, "store": {"sizeLimit": "1Gi", "hostPath": {"path": "relative"}}}, "/store/hostPath/path"),
        ({**SOURCES, "store": {"sizeLimit": "1Gi", "hostPath": {"path": "/"}}}, "/store/hostPath/path"),
        ({**SOURCES, "store": {"sizeLimit": "1Gi", "hostPath": {"path": "/a/.."}}}, "/store/hostPath/path"),
        ({**SOURCES, "store": {"sizeLimit": "1Gi", "hostPath": {"path": "/./."}}}, "/store/hostPath/path"),
        ({"store": {"hostPath": {"path": "/a"}}}, "needs sources.allow"),
    ],
    ids=["two volumes", "relative", "whole node", "way back", "whole node again", "no source"],
)
def test_a_folder_of_the_node_stands_alone(charts: Charts, sources: Object, word: str) -> None:
    assert word in charts.try_template(CHART, with_minimal(sources=sources)).stderr


@pytest.mark.parametrize("prefix", ["s3://b/m?x=1", "https://me:word@host/m", "file:///models", "models"])
def test_prefixes_are_plain(charts: Charts, prefix: str) -> None:
    sources = {"allow": [prefix], "store": {"sizeLimit": "1Gi"}}
    assert "/sources/allow/0" in charts.try_template(CHART, with_minimal(sources=sources)).stderr


@pytest.mark.parametrize(
    ("keys", "source"),
    [
        ({"configMap": "release"}, {"configMap": {"name": "release"}}),
        ({"secret": "release"}, {"secret": {"secretName": "release", "defaultMode": 0o440}}),
    ],
    ids=["configMap", "secret"],
)
def test_who_must_vouch_for_versions_is_told_and_mounted(
    charts: Charts, keys: dict[str, str], source: dict[str, Any]
) -> None:
    objects = charts.template(CHART, with_minimal(verification={"required": True, "keys": keys}))
    container = engine(objects)
    assert "--require-signature" in container["args"]
    mount = mounts(container)[flag(container, "trusted-keys")[0]]
    assert (mount["name"], mount["readOnly"]) == ("trusted-keys", True)
    assert "subPath" not in mount  # a subPath would never see another key
    assert volumes(objects)["trusted-keys"] == {"name": "trusted-keys", **source}
    optional = engine(charts.template(CHART, with_minimal(verification={"keys": keys})))
    assert "--require-signature" not in optional["args"]
    assert flag(optional, "trusted-keys"), "a ModelVersion may ask for signatures"


def test_by_default_nobody_must_vouch(charts: Charts) -> None:
    objects = charts.template(CHART, MINIMAL)
    assert not [a for a in engine(objects)["args"] if a.startswith(("--require-signature", "--trusted-keys"))]
    assert "trusted-keys" not in volumes(objects)


@pytest.mark.parametrize(
    ("verification", "word"),
    [
        ({"required": True}, "verification.required needs"),
        ({"keys": {"configMap": "a", "secret": "b"}}, "not both"),
        ({"keys": ["a"]}, "/verification/keys"),
    ],
    ids=str,
)
def test_nobody_to_vouch_is_said_before_a_pod_starts(charts: Charts, verification: dict[str, Any], word: str) -> None:
    assert word in charts.try_template(CHART, with_minimal(verification=verification)).stderr
