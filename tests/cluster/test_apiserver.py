"""The bare API server behaves as the tests that stand on it assume."""

from __future__ import annotations

import json

import pytest

from tests.support.apiserver import ISSUER, ApiServer

pytestmark = pytest.mark.api


def test_it_serves_the_version_it_was_built_from(api_server: ApiServer) -> None:
    version = json.loads(api_server.kubectl("version", "-o", "json"))["serverVersion"]
    assert (version["major"], version["minor"]) == ("1", "36")
    assert version["gitVersion"].startswith("v1.36.")


def test_a_user_has_only_the_rights_that_rbac_gives(api_server: ApiServer) -> None:
    refused = api_server.try_kubectl("get", "pods", kubeconfig=api_server.kubeconfig_of("nobody-in-particular"))
    assert refused.returncode != 0
    assert 'User "nobody-in-particular" cannot list resource "pods"' in refused.stderr


def test_it_signs_tokens_for_an_audience_that_its_jwks_can_check(api_server: ApiServer) -> None:
    import jwt

    api_server.kubectl("create", "namespace", "tokens")
    api_server.kubectl("create", "serviceaccount", "caller", "-n", "tokens")
    token = api_server.kubectl("create", "token", "caller", "-n", "tokens", "--audience=some-pod").strip()
    keys = jwt.PyJWKSet.from_json(api_server.kubectl("get", "--raw", "/openid/v1/jwks"))
    key = keys[jwt.get_unverified_header(token)["kid"]]
    claims = jwt.decode(token, key, algorithms=["RS256"], audience="some-pod", issuer=ISSUER)
    assert claims["sub"] == "system:serviceaccount:tokens:caller"


def test_pods_are_admitted_without_nodes_and_without_service_accounts(api_server: ApiServer) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "simulated"},
        "spec": {"containers": [{"name": "engine", "image": "none"}]},
    }
    api_server.kubectl("create", "namespace", "simulated")
    api_server.kubectl("apply", "-n", "simulated", "-f", "-", stdin=json.dumps(pod))
    assert (
        api_server.kubectl("get", "pod", "simulated", "-n", "simulated", "-o", "jsonpath={.status.phase}") == "Pending"
    )


def test_its_data_outlive_an_outage(own_api_server: ApiServer) -> None:
    own_api_server.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    own_api_server.stop_apiserver(kill=True)
    assert own_api_server.try_kubectl("get", "configmap", "kept", "--request-timeout=2s").returncode != 0
    own_api_server.start_apiserver()
    assert own_api_server.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"
