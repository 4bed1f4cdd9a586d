"""Who may write what the operator owns, as a real API server with its controllers says under the chart's policy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from modelswap_engine.protocol.assignment import ASSIGNMENT_KEY
from modelswap_operator.api.labels import FIELD_MANAGER, MANAGED_BY_LABEL, SLOT_LABEL
from tests.support.apiserver import ApiServer
from tests.support.charts import Charts
from tests.support.rest import Answer, Rest

pytestmark = pytest.mark.api

NAMESPACE = "team"
HERE = f"/api/v1/namespaces/{NAMESPACE}"
MAPS, SERVICES = f"{HERE}/configmaps", f"{HERE}/services"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
MERGE = "application/merge-patch+json"
OWNED = {SLOT_LABEL: "chat", MANAGED_BY_LABEL: FIELD_MANAGER}
ADAPTER = {"apiVersion": "modelswap.dev/v1alpha1", "kind": "LoRAAdapter", "name": "a", "uid": "u", "controller": True}
OBJECTS = (f"{MAPS}/modelswap-chat", f"{SERVICES}/support", f"{SLICES}/support-1")
REFUSED = "the modelswap operator's to write"
TENANT, RESTORER = "tenant", "system:serviceaccount:velero:velero"
OPERATOR, SCOPED = "system:serviceaccount:modelswap-system:modelswap", "system:serviceaccount:ops:scoped-modelswap"


def configmap(name: str = "modelswap-chat", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": dict(OWNED)}
    return {"metadata": metadata, "data": {ASSIGNMENT_KEY: '{"revision": 1}', "ledger.json": "{}"}, **more}


def service(name: str = "support") -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": dict(OWNED)}, "spec": {"ports": [{"port": 80}]}}


def endpoint_slice(name: str = "support-1") -> dict[str, Any]:
    labels = {
        **OWNED,
        "kubernetes.io/service-name": "support",
        "endpointslice.kubernetes.io/managed-by": "modelswap.dev",
    }
    endpoints = [{"addresses": ["10.0.0.1"]}]
    return {"metadata": {"name": name, "labels": labels}, "addressType": "IPv4", "endpoints": endpoints, "ports": []}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, charts: Charts) -> Iterator[ApiServer]:
    """A server with controllers, the chart's rights and policies, and a tenant; it knows no ModelVersions."""
    with ApiServer(tmp_path_factory.mktemp("guard"), controllers=True) as server:
        for name in ("modelswap-system", "ops", NAMESPACE):
            server.kubectl("create", "namespace", name)
        values = {"rbac": {"adapterServices": True}, "crds": {"enabled": False}}
        scoped = {**values, "watch": {"namespaces": [NAMESPACE]}, "rbac": {**values["rbac"], "aggregate": False}}
        objects = charts.template("modelswap", values, release="modelswap", namespace="modelswap-system")
        objects += charts.template("modelswap", scoped, release="scoped", namespace="ops")
        server.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(thing) for thing in objects))
        role = ("create", "role", "slices", "-n", NAMESPACE, "--verb=*", "--resource=endpointslices.discovery.k8s.io")
        server.kubectl(*role)
        server.kubectl("create", "rolebinding", "slices", "-n", NAMESPACE, "--role=slices", f"--user={TENANT}")
        server.kubectl("create", "rolebinding", "tenant", "-n", NAMESPACE, "--clusterrole=admin", f"--user={TENANT}")
        server.kubectl("create", "clusterrolebinding", "restore", "--clusterrole=cluster-admin", f"--user={RESTORER}")
        tenant, deadline = Rest(server, user=TENANT), time.monotonic() + 60
        while tenant.call("POST", f"{MAPS}?dryRun=All", configmap()).message.find(REFUSED) < 0:
            assert time.monotonic() < deadline, "the policy is not enforced, or the tenant has no rights"
            time.sleep(0.1)  # a policy counts a moment after it is stored, and nothing says when
        yield server


@pytest.fixture(scope="module")
def tenant(server: ApiServer) -> Rest:
    return Rest(server, user=TENANT)


@pytest.fixture
def operator(server: ApiServer) -> Iterator[Rest]:
    """The operator, with an assignment, a Service and its EndpointSlice written."""
    operator = Rest(server, user=OPERATOR)
    for path, body in ((MAPS, configmap()), (SERVICES, service()), (SLICES, endpoint_slice())):
        body["metadata"]["ownerReferences"] = [ADAPTER]
        operator.call("POST", path, body).accepted()
    yield operator
    for path in OBJECTS:
        Rest(server).call("DELETE", path)


def change(metadata: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"metadata": metadata or {}, **more}


def is_refused(answer: Answer) -> bool:
    return answer.status == 403 and REFUSED in answer.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MAPS, configmap("modelswap-new")),
        (MAPS, {**configmap("modelswap-new"), "metadata": {"name": "modelswap-new"}}),
        (MAPS, {"metadata": {"generateName": "modelswap-"}, "data": configmap()["data"]}),
        (MAPS, {"metadata": {"name": "modelswap-new"}, "binaryData": {ASSIGNMENT_KEY: "e30="}}),
        (MAPS, configmap("another-name")),
        (SERVICES, service("new")),
        (SLICES, endpoint_slice("new")),
    ],
    ids=["assignment", "without-labels", "generated-name", "as-binary", "label-on-another", "service", "slice"],
)
@pytest.mark.parametrize("query", ["", "?dryRun=All"], ids=["", "dry"])
def test_a_tenant_creates_nothing_that_looks_like_the_operators(
    tenant: Rest, path: str, body: dict[str, Any], query: str
) -> None:
    answer = tenant.call("POST", path + query, body)
    assert is_refused(answer), answer.body
    assert "patch modelversions/status there" in answer.message
    assert " team/" in answer.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{MAPS}/modelswap-chat", change(data={ASSIGNMENT_KEY: "{}"})),
        (f"{MAPS}/modelswap-chat", change(data={ASSIGNMENT_KEY: None})),
        (f"{MAPS}/modelswap-chat", change(data={"ledger.json": "[]"})),
        (f"{MAPS}/modelswap-chat", change(binaryData={"more": "e30="})),
        (f"{MAPS}/modelswap-chat", change(immutable=True)),
        (f"{MAPS}/modelswap-chat", change({"labels": {SLOT_LABEL: "another"}})),
        (f"{MAPS}/modelswap-chat", change({"labels": {MANAGED_BY_LABEL: None}})),
        (f"{MAPS}/modelswap-chat", change({"labels": None})),
        (f"{SERVICES}/support", change(spec={"selector": {"app": "mine"}})),
        (f"{SERVICES}/support", change({"labels": {MANAGED_BY_LABEL: "Helm"}})),
        (f"{SLICES}/support-1", change(endpoints=[{"addresses": ["10.6.6.6"]}])),
        (f"{SLICES}/support-1", change({"labels": {"kubernetes.io/service-name": "mine"}})),
        (f"{SLICES}/support-1", change({"labels": {"endpointslice.kubernetes.io/managed-by": "me"}})),
    ],
)
@pytest.mark.parametrize("query", ["", "?dryRun=All"], ids=["", "dry"])
def test_a_tenant_changes_nothing_that_the_operator_wrote(
    operator: Rest, tenant: Rest, path: str, body: dict[str, Any], query: str
) -> None:
    before = operator.call("GET", path).accepted()
    assert is_refused(tenant.call("PATCH", path + query, body, content=MERGE))
    whole = deepcopy(before)
    whole["metadata"]["labels"] = {}
    assert is_refused(tenant.call("PUT", path + query, whole))
    assert operator.call("GET", path).accepted() == before


def test_no_configmap_becomes_an_assignment_step_by_step(tenant: Rest) -> None:
    tenant.call("POST", MAPS, {"metadata": {"name": "modelswap-step"}, "data": {"mine": "1"}}).accepted()
    path = f"{MAPS}/modelswap-step"
    assert is_refused(tenant.call("PATCH", path, change(data={ASSIGNMENT_KEY: "{}"}), content=MERGE))
    assert is_refused(tenant.call("PATCH", path, change({"labels": OWNED}), content=MERGE))
    tenant.call("PATCH", path, change(data={"mine": "2"}), content=MERGE).accepted()
    tenant.call("DELETE", path).accepted()


def test_a_tenant_keeps_what_is_its_own_and_may_delete_and_mark_what_is_not(operator: Rest, tenant: Rest) -> None:
    for name in ("settings", "modelswap-settings"):
        mine = {"metadata": {"name": name, "labels": {SLOT_LABEL: "chat"}}, "data": {"a": "b"}}
        tenant.call("POST", MAPS, mine).accepted()
        tenant.call("PATCH", f"{MAPS}/{name}", change(data={"a": "c"}, immutable=True), content=MERGE).accepted()
        tenant.call("DELETE", f"{MAPS}/{name}").accepted()
    for path in OBJECTS:
        marked = change({"annotations": {"seen": "yes"}, "labels": {"cost-centre": "7"}})
        tenant.call("PATCH", path, marked, content=MERGE).accepted()
        tenant.call("DELETE", f"{path}?dryRun=All").accepted()
        tenant.call("DELETE", path).accepted()


@pytest.mark.parametrize("user", [OPERATOR, SCOPED, RESTORER, ""], ids=["operator", "scoped", "restore", "admin"])
def test_operators_and_administrators_write_and_restore_it(server: ApiServer, user: str) -> None:
    """None of them is named anywhere: they may write status."""
    writer, tenant = Rest(server, user=user), Rest(server, user=TENANT)
    writer.call("POST", MAPS, configmap("modelswap-kept")).accepted()
    path = f"{MAPS}/modelswap-kept"
    for data in ({ASSIGNMENT_KEY: '{"revision": 2}'}, {ASSIGNMENT_KEY: None}):
        writer.call("PATCH", path, change(data=data), content=MERGE).accepted()
    tenant.call("DELETE", path).accepted()


def test_the_largest_assignment_is_within_what_an_expression_may_cost(server: ApiServer, tenant: Rest) -> None:
    path, operator = f"{MAPS}/modelswap-large", Rest(server, user=OPERATOR)
    operator.call("POST", MAPS, configmap("modelswap-large", data={ASSIGNMENT_KEY: "x" * 1_000_000})).accepted()
    tenant.call("PATCH", path, change({"annotations": {"seen": "yes"}}), content=MERGE).accepted()
    assert is_refused(tenant.call("PATCH", path, change(data={ASSIGNMENT_KEY: "x" * 999_999}), content=MERGE))
    operator.call("PATCH", path, change(data={ASSIGNMENT_KEY: "y" * 1_000_000}), content=MERGE).accepted()


def test_a_right_in_the_namespace_is_what_breaks_the_glass(server: ApiServer, tenant: Rest) -> None:
    rules = [{"apiGroups": ["modelswap.dev"], "resources": ["modelversions/status"], "verbs": ["patch"]}]
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles"
    Rest(server).call("POST", roles, {"metadata": {"name": "glass"}, "rules": rules}).accepted()
    server.kubectl("create", "rolebinding", "glass", "-n", NAMESPACE, "--role=glass", f"--user={TENANT}")
    deadline = time.monotonic() + 60
    while (answer := tenant.call("POST", f"{MAPS}?dryRun=All", configmap("modelswap-new"))).status == 403:
        assert time.monotonic() < deadline, answer.body
        time.sleep(0.1)  # the authorizer follows its own watch
    server.kubectl("delete", "rolebinding", "glass", "-n", NAMESPACE)
    while not is_refused(tenant.call("POST", f"{MAPS}?dryRun=All", configmap("modelswap-new"))):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_garbage_collector_takes_an_owner_out_of_what_outlives_it(server: ApiServer, operator: Rest) -> None:
    owner = operator.call("POST", MAPS, {"metadata": {"name": "modelswap-owner"}}).accepted()["metadata"]
    second = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["name"], "uid": owner["uid"]}
    for path in OBJECTS:
        body = change({"ownerReferences": [ADAPTER, second]})
        operator.call("PATCH", path, body, content=MERGE).accepted()
    Rest(server).call("DELETE", f"{MAPS}/modelswap-owner?propagationPolicy=Orphan").accepted()
    server.kubectl("wait", "--for=delete", "configmap/modelswap-owner", "-n", NAMESPACE, "--timeout=60s")
    for path in OBJECTS:
        assert operator.call("GET", path).accepted()["metadata"]["ownerReferences"] == [ADAPTER]


def test_the_policy_is_typed_without_a_warning(server: ApiServer) -> None:
    names = ("validatingadmissionpolicies", "modelswap-owned")
    server.kubectl("wait", "--for=jsonpath={.status.observedGeneration}=1", *names, "--timeout=60s")
    found = json.loads(server.kubectl("get", *names, "-o", "json"))
    assert found["status"]["typeChecking"].get("expressionWarnings", []) == []


def test_a_namespace_goes_with_all_that_is_in_it(server: ApiServer) -> None:
    server.kubectl("create", "namespace", "leaving")
    Rest(server, user=OPERATOR).call("POST", "/api/v1/namespaces/leaving/configmaps", configmap()).accepted()
    server.kubectl("delete", "namespace", "leaving", "--timeout=60s")
