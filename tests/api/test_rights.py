"""What the operator's account must not be able to do, tried with the rights that the chart gives it, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.apiserver import ApiServer
from tests.support.custom import GROUP_VERSION, model_version
from tests.support.operated import granted
from tests.support.rest import Rest

pytestmark = pytest.mark.api

NAMESPACE = "rights"
HERE = f"/api/v1/namespaces/{NAMESPACE}"
OBJECTS = f"/apis/{GROUP_VERSION}/namespaces/{NAMESPACE}"
MERGE = "application/merge-patch+json"


@pytest.fixture(scope="module")
def account(definitions: ApiServer, rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> Rest:
    """The operator's account of one namespace; a ModelVersion, a Secret and a pod are there to be touched."""
    home: Path = tmp_path_factory.mktemp("rights")
    given = granted(definitions, rest, home, namespace=NAMESPACE)
    rest.call("POST", f"{OBJECTS}/modelversions", model_version("chat")).accepted()
    rest.call("POST", f"{HERE}/secrets", {"metadata": {"name": "key"}, "stringData": {"key": "secret"}}).accepted()
    body = {"metadata": {"name": "pod"}, "spec": {"containers": [{"name": "engine", "image": "none"}]}}
    rest.call("POST", f"{HERE}/pods", body).accepted()
    return Rest(definitions, user=given.user)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/namespaces/default/pods"),
        ("GET", "/api/v1/namespaces/default/configmaps"),
        ("GET", "/api/v1/nodes"),
        ("GET", "/api/v1/namespaces/default/services"),
        ("DELETE", "/api/v1/namespaces/default/services/kubernetes"),
        ("POST", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"),
        ("PUT", f"{HERE}/services/chat"),
        ("PATCH", f"{HERE}/services/chat/status"),
        ("PATCH", f"{HERE}/endpoints/chat"),
        ("GET", f"{HERE}/secrets"),
        ("GET", f"{HERE}/secrets/key"),
        ("GET", f"{HERE}/pods/pod/log"),
        ("POST", f"{HERE}/pods/pod/exec?command=sh"),
        ("POST", f"{HERE}/pods/pod/portforward"),
        ("POST", f"{HERE}/pods/pod/eviction"),
        ("POST", f"{HERE}/pods"),
        ("PATCH", f"{HERE}/pods/pod"),
        ("PATCH", f"{HERE}/pods/pod/status"),
        ("DELETE", f"{HERE}/pods/pod"),
        ("DELETE", f"{HERE}/configmaps/modelswap-chat"),
        ("POST", f"{HERE}/serviceaccounts/default/token"),
        ("PATCH", f"{OBJECTS}/modelversions/chat"),
        ("DELETE", f"{OBJECTS}/modelversions/chat"),
        ("POST", f"{OBJECTS}/modelversions"),
        ("DELETE", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/another"),
        ("PATCH", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/another"),
        ("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings"),
        ("PATCH", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/engine"),
        ("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"),
    ],
)
def test_it_is_forbidden(account: Rest, method: str, path: str) -> None:
    body = None if method == "GET" else {"metadata": {"labels": {"touched": "yes"}}}
    answer = account.call(method, path, body, content=MERGE if method == "PATCH" else "application/json")
    assert answer.status == 403, answer.body


def test_what_it_needs_it_may(account: Rest) -> None:
    """Else everything above would hold for an account without any right."""
    assert account.call("GET", f"{HERE}/pods").status == 200
    assert account.call("GET", f"{OBJECTS}/modelversions/chat").status == 200
    status = {"status": {"observedGeneration": 1}}
    assert account.call("PATCH", f"{OBJECTS}/modelversions/chat/status", status, content=MERGE).status == 200
