"""What a real API server says of the rendered charts: schemas, Pod Security, rights, the ConfigMap guard."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.apiserver import ApiServer
from tests.support.cache import REPOSITORY
from tests.support.charts import CHARTS, Charts, Object, case_id, cases, one, pod_templates
from tests.support.custom import lora_adapter, model_version
from tests.support.processes import Child
from tests.support.rest import APPLY, Rest

pytestmark = pytest.mark.api

OPERATOR = "system:serviceaccount:modelswap-system:modelswap"
SCOPED = "system:serviceaccount:ops:scoped-modelswap"
SCOPED_VALUES = {"watch": {"namespaces": ["team-a"]}, "crds": {"enabled": False}, "rbac": {"aggregate": False}}
# Value sets in which the user names a volume that "restricted" forbids.
OWN_VOLUMES = ("host-path-values.yaml", "gpu-values.yaml", "node-store-values.yaml")
UNKNOWN_HERE = ("monitoring.coreos.com", "cert-manager.io")
RESTRICTED = "pod-security.kubernetes.io/enforce"


def apply(server: ApiServer, objects: list[Object], *arguments: str) -> None:
    known = [o for o in objects if o["apiVersion"].partition("/")[0] not in UNKNOWN_HERE]
    stream = "\n---\n".join(json.dumps(o) for o in known)
    command = ("apply", "--server-side", "--force-conflicts", "--validate=strict", *arguments, "-f", "-")
    server.kubectl(*command, stdin=stream)


def ensure_namespace(rest: Rest, name: str, **labels: str) -> None:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    rest.call("PATCH", f"/api/v1/namespaces/{name}?fieldManager=test", body, content=APPLY).accepted()


@pytest.mark.parametrize(("chart", "values"), cases(), ids=case_id)
def test_server_accepts_every_object(
    definitions: ApiServer, rest: Rest, charts: Charts, chart: str, values: Path
) -> None:
    for name in ("serving", "team-a", "team-b"):
        ensure_namespace(rest, name)
    apply(definitions, charts.template(chart, values), "--dry-run=server")


@pytest.mark.parametrize(
    ("chart", "values"), [case for case in cases() if case[1].name not in OWN_VOLUMES], ids=case_id
)
def test_pods_are_admitted_where_restricted_is_enforced(rest: Rest, charts: Charts, chart: str, values: Path) -> None:
    ensure_namespace(rest, "restricted", **{RESTRICTED: "restricted"})
    for template in pod_templates(charts.template(chart, values)):
        create_pod(rest, template).accepted()


@pytest.mark.parametrize("name", ["host-path-values.yaml", "node-store-values.yaml"])
def test_only_a_folder_of_the_node_keeps_a_pod_from_being_restricted(rest: Rest, charts: Charts, name: str) -> None:
    ensure_namespace(rest, "restricted", **{RESTRICTED: "restricted"})
    values = CHARTS / "modelswap-engine" / "ci" / name
    (template,) = pod_templates(charts.template("modelswap-engine", values))
    answer = create_pod(rest, template)
    assert answer.status == 403
    assert 'restricted volume type "hostPath"' in answer.message
    for other in ("Privilege", "runAs", "seccomp", "capabilities", "host ports", "host namespaces"):
        assert other not in answer.message


def create_pod(rest: Rest, template: Object) -> Any:
    spec = {k: v for k, v in template["spec"].items() if k not in ("priorityClassName", "runtimeClassName")}
    metadata = {"name": "tried", "labels": template["metadata"]["labels"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return rest.call("POST", "/api/v1/namespaces/restricted/pods?dryRun=All", pod)


@pytest.fixture(scope="module")
def installed(definitions: ApiServer, rest: Rest, charts: Charts) -> ApiServer:
    """Two operators: one for the cluster in modelswap-system, one for the namespace team-a in ops."""
    for name in ("modelswap-system", "ops", "team-a", "team-b"):
        ensure_namespace(rest, name)
    apply(definitions, charts.template("modelswap", release="modelswap", namespace="modelswap-system"))
    apply(definitions, charts.template("modelswap", SCOPED_VALUES, release="scoped", namespace="ops"))
    return definitions


def may(rest: Rest, user: str, verb: str, resource: str, namespace: str = "", name: str = "") -> bool:
    kind, _, group = resource.partition(".")
    kind, _, subresource = kind.partition("/")
    home = user.split(":")[2]
    spec = {
        "user": user,
        "groups": ["system:serviceaccounts", f"system:serviceaccounts:{home}", "system:authenticated"],
        "resourceAttributes": {
            "verb": verb,
            "resource": kind,
            "subresource": subresource,
            "group": group,
            "namespace": namespace,
            "name": name,
        },
    }
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = rest.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body).accepted()
    return bool(answer["status"]["allowed"])


@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "name"),
    [
        ("watch", "modelversions.modelswap.dev", "", ""),
        ("patch", "modelversions/status.modelswap.dev", "team-b", "slot"),
        ("list", "pods", "", ""),
        ("patch", "configmaps", "team-b", "modelswap-slot"),
        ("create", "events.events.k8s.io", "team-b", ""),
        ("create", "serviceaccounts/token", "modelswap-system", "modelswap"),
        ("create", "leases.coordination.k8s.io", "modelswap-system", ""),
        ("update", "leases.coordination.k8s.io", "modelswap-system", "modelswap"),
    ],
)
def test_operator_may(installed: ApiServer, rest: Rest, verb: str, resource: str, namespace: str, name: str) -> None:
    assert may(rest, OPERATOR, verb, resource, namespace, name)


@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "name"),
    [
        ("patch", "modelversions.modelswap.dev", "team-b", "slot"),
        ("update", "modelversions/finalizers.modelswap.dev", "team-b", "slot"),
        ("get", "secrets", "team-b", "s"),
        ("create", "pods/exec", "team-b", "p"),
        ("patch", "pods", "team-b", "p"),
        ("delete", "pods", "team-b", "p"),
        ("delete", "configmaps", "team-b", "modelswap-slot"),
        ("create", "serviceaccounts/token", "modelswap-system", "default"),
        ("create", "serviceaccounts/token", "team-b", "modelswap"),
        ("update", "leases.coordination.k8s.io", "modelswap-system", "another"),
        ("create", "leases.coordination.k8s.io", "team-b", ""),
        ("create", "services", "team-b", ""),
        ("patch", "endpointslices.discovery.k8s.io", "team-b", "s"),
        ("list", "namespaces", "", ""),
        ("list", "customresourcedefinitions.apiextensions.k8s.io", "", ""),
        ("impersonate", "users", "", ""),
    ],
)
def test_operator_may_not(
    installed: ApiServer, rest: Rest, verb: str, resource: str, namespace: str, name: str
) -> None:
    assert not may(rest, OPERATOR, verb, resource, namespace, name)


@pytest.mark.parametrize("resource", ["modelversions.modelswap.dev", "pods", "configmaps"])
def test_scoped_operator_sees_its_namespace_only(installed: ApiServer, rest: Rest, resource: str) -> None:
    assert may(rest, SCOPED, "list", resource, "team-a")
    assert not may(rest, SCOPED, "list", resource, "team-b")
    assert not may(rest, SCOPED, "list", resource)


def test_guard_lets_the_operator_write_assignments_only(installed: ApiServer) -> None:
    def create(name: str, *arguments: str) -> str:
        command = ("create", "configmap", name, "-n", "team-b", "--dry-run=server", *arguments)
        return installed.try_kubectl(*command).stderr

    as_operator = f"--as={OPERATOR}"
    deadline = time.monotonic() + 60
    while not (refusal := create("kube-root-ca.crt", as_operator)) and time.monotonic() < deadline:
        time.sleep(0.1)  # the server begins to enforce a new policy a moment after it is stored
    assert "may write assignments (modelswap-SLOT) only, not the ConfigMap kube-root-ca.crt" in refusal
    assert create("modelswap-slot", as_operator) == ""
    assert create("anything") == ""  # of nobody else anything is asked


def test_services_of_others_are_kept_from_an_operator_that_may_write_those_of_adapters(
    installed: ApiServer, rest: Rest, charts: Charts
) -> None:
    values = {"rbac": {"adapterServices": True}, "crds": {"enabled": False}}
    apply(installed, charts.template("modelswap", values, release="routing", namespace="ops"))
    account = Rest(installed, user="system:serviceaccount:ops:routing-modelswap")
    services, slices = (
        "/api/v1/namespaces/team-b/services",
        "/apis/discovery.k8s.io/v1/namespaces/team-b/endpointslices",
    )
    owner = {"apiVersion": "modelswap.dev/v1alpha1", "kind": "LoRAAdapter", "name": "a", "uid": "u", "controller": True}
    mine = {"metadata": {"name": "mine", "ownerReferences": [owner]}, "spec": {"ports": [{"port": 80}]}}
    theirs = {"metadata": {"name": "theirs"}, "spec": {"ports": [{"port": 80}]}}
    part = {"metadata": {"name": "p"}, "addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"]}]}
    rest.call("POST", services, theirs).accepted()
    merge = "application/merge-patch+json"
    deadline = time.monotonic() + 60
    while account.call("POST", f"{services}?dryRun=All", {**theirs, "metadata": {"name": "new"}}).status != 403:
        assert time.monotonic() < deadline, "the policy is not enforced"
        time.sleep(0.1)
    refusals = [
        account.call("POST", slices, part),
        account.call("DELETE", f"{services}/theirs"),
        account.call("PATCH", f"{services}/theirs", {"metadata": {"ownerReferences": [owner]}}, content=merge),
        account.call("POST", services, {**mine, "spec": {**mine["spec"], "externalIPs": ["192.0.2.1"]}}),
    ]
    assert [(answer.status, "the modelswap operator may" in answer.message) for answer in refusals] == [(403, True)] * 4
    account.call("POST", services, mine).accepted()
    account.call("POST", slices, {**part, "metadata": {"name": "p", "ownerReferences": [owner]}}).accepted()
    account.call("PATCH", f"{services}/mine", {"metadata": {"labels": {"a": "b"}}}, content=merge).accepted()
    account.call("DELETE", f"{slices}/p").accepted()
    account.call("DELETE", f"{services}/mine").accepted()
    assert rest.call("GET", f"{services}/theirs").status == 200


def test_guard_is_of_this_operator_alone(installed: ApiServer, charts: Charts) -> None:
    objects = charts.template("modelswap", release="modelswap", namespace="modelswap-system")
    named = [o for o in objects if o["metadata"]["name"] == "modelswap-configmaps"]
    policy, binding = one(named, "ValidatingAdmissionPolicy"), one(named, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert OPERATOR in policy["spec"]["matchConditions"][0]["expression"]


@pytest.mark.parametrize(
    ("account", "release", "namespace", "watched"),
    [(OPERATOR, "modelswap", "modelswap-system", "team-b"), (SCOPED, "scoped", "ops", "team-a")],
    ids=["cluster-wide", "scoped"],
)
def test_operator_works_with_these_rights_and_no_others(
    installed: ApiServer, charts: Charts, tmp_path: Path, account: str, release: str, namespace: str, watched: str
) -> None:
    values = SCOPED_VALUES if release == "scoped" else None
    (template,) = pod_templates(charts.template("modelswap", values, release=release, namespace=namespace))
    arguments = [*template["spec"]["containers"][0]["args"], f"--kubeconfig={installed.kubeconfig_of(account)}"]
    environment = [f"POD_NAMESPACE={namespace}", "POD_NAME=here", f"SERVICE_ACCOUNT={account.split(':')[3]}"]
    program = [sys.executable, "-m", "modelswap_operator", *arguments, "--http-host=127.0.0.1", "--http-port=0"]
    path = f"PYTHONPATH={REPOSITORY / 'operator'}:{REPOSITORY / 'engine'}"
    operator = Child("operator", ["env", path, *environment, *program], log=tmp_path / "operator.log")
    try:
        for thing in (model_version(), lora_adapter()):
            installed.kubectl("apply", "-n", watched, "-f", "-", stdin=json.dumps(thing))
        names = ("modelversion/slot", "loraadapter/adapter")
        seen = installed.try_kubectl(
            "wait", "-n", watched, *names, "--for=jsonpath={.status.conditions[0].type}", "--timeout=60s"
        )
        operator.check()
        assert seen.returncode == 0, f"{seen.stderr}\n{operator.tail(lines=40)}"
    finally:
        operator.stop()
        installed.kubectl("delete", "-n", watched, "modelversions,loraadapters", "--all")
    log = operator.log.read_text()
    assert "leading" in log
    assert "orbidden" not in log
