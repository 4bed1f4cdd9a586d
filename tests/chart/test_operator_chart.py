"""The operator's chart: rights, watch scope, definitions, leader election."""

from typing import Any

import pytest
import yaml

from tests.support.cache import REPOSITORY
from tests.support.charts import Charts, Object, of_kind, one, pod_templates

CHART = "modelswap"
ACCOUNT = {"kind": "ServiceAccount", "name": "demo-modelswap", "namespace": "serving"}
Right = tuple[str, str, str, str]  # group, resource, verb, name ("" = any)

READ = ("get", "list", "watch")
AT_WORK: set[Right] = {
    *(("modelswap.dev", kind, verb, "") for kind in ("modelversions", "loraadapters") for verb in READ),
    *(
        ("modelswap.dev", f"{kind}/status", verb, "")
        for kind in ("modelversions", "loraadapters")
        for verb in ("get", "patch", "update")
    ),
    *(("", "pods", verb, "") for verb in READ),
    *(("", "configmaps", verb, "") for verb in (*READ, "create", "patch", "update")),
    *((group, "events", verb, "") for group in ("", "events.k8s.io") for verb in ("create", "patch")),
}
AT_HOME: set[Right] = {
    ("", "serviceaccounts/token", "create", "demo-modelswap"),
    ("coordination.k8s.io", "leases", "create", ""),
    ("", "configmaps", "get", "changes.modelswap.dev"),
    *(("coordination.k8s.io", "leases", verb, "demo-modelswap") for verb in ("get", "update", "patch")),
}


def rights(role: Object) -> set[Right]:
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def bound(objects: list[Object]) -> dict[tuple[str, str], set[Right]]:
    """What the operator's account may do, by scope ("" = the whole cluster) and role, as the bindings say."""
    found: dict[tuple[str, str], set[Right]] = {}
    for binding in [*of_kind(objects, "ClusterRoleBinding"), *of_kind(objects, "RoleBinding")]:
        assert binding["subjects"] == [ACCOUNT]
        reference = binding["roleRef"]
        where = binding["metadata"].get("namespace", "")
        role = next(
            o
            for o in of_kind(objects, reference["kind"])
            if o["metadata"]["name"] == reference["name"] and o["metadata"].get("namespace", "") == where
        )
        found[(where, reference["name"])] = rights(role)
    return found


def arguments(objects: list[Object]) -> list[str]:
    container = next(pod_templates(objects))["spec"]["containers"][0]
    assert container["command"] == ["python3", "-m", "modelswap_operator"]
    found: list[str] = container["args"]
    return found


def test_cluster_wide_watch_has_exactly_these_rights(charts: Charts) -> None:
    assert bound(charts.template(CHART)) == {
        ("", "demo-modelswap"): AT_WORK,
        ("serving", "demo-modelswap-home"): AT_HOME,
    }


def test_namespaced_watch_has_rights_nowhere_else(charts: Charts) -> None:
    objects = charts.template(CHART, {"watch": {"namespaces": ["a", "123"]}, "rbac": {"aggregate": False}})
    assert bound(objects) == {
        ("a", "demo-modelswap"): AT_WORK,
        ("123", "demo-modelswap"): AT_WORK,
        ("serving", "demo-modelswap-home"): AT_HOME,
    }
    assert not of_kind(objects, "ClusterRole")
    assert not of_kind(objects, "ValidatingAdmissionPolicy")


@pytest.mark.parametrize("values", [{}, {"rbac": {"create": False}}], ids=["", "own-roles"])
def test_what_the_operator_owns_is_guarded_whoever_gives_it_its_rights(charts: Charts, values: dict[str, Any]) -> None:
    def guards(**more: Any) -> list[str]:
        kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
        return [
            o["kind"]
            for o in charts.template(CHART, {**values, **more})
            if o["metadata"]["name"] == "demo-modelswap-owned" and o["kind"] in kinds
        ]

    assert guards() == ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    assert guards(admission={"guard": False}) == []
    assert guards(watch={"namespaces": ["a"]}) == []


def test_the_lease_is_there_without_leader_election_too(charts: Charts) -> None:
    # Its transitions are the epoch that engine pods fence by.
    objects = charts.template(CHART, {"leaderElection": {"enabled": False}})
    assert bound(objects)[("serving", "demo-modelswap-home")] == AT_HOME
    assert "--leader-elect" not in arguments(objects)
    assert "--lease-name=demo-modelswap" in arguments(objects)
    assert "--leader-elect" in arguments(charts.template(CHART))


def test_scope_is_passed_to_the_operator(charts: Charts) -> None:
    everywhere = arguments(charts.template(CHART))
    assert "--all-namespaces" in everywhere
    assert "--namespace" not in everywhere
    some = arguments(charts.template(CHART, {"watch": {"namespaces": ["a", "123"]}}))
    assert "--all-namespaces" not in some
    assert some[:4] == ["--namespace", "a", "--namespace", "123"]


def test_the_lease_named_on_the_command_line_is_the_one_that_rbac_allows(charts: Charts) -> None:
    objects = charts.template(CHART, {"fullnameOverride": "swapper"})
    home = next(o for o in of_kind(objects, "Role") if o["metadata"]["name"] == "swapper-home")
    named = {r[3] for r in rights(home) if r[1] == "leases" and r[3]}
    assert f"--lease-name={named.pop()}" in arguments(objects)
    assert not named


def test_built_in_roles_cover_the_two_kinds(charts: Charts) -> None:
    roles = of_kind(charts.template(CHART), "ClusterRole")
    given: dict[str, set[tuple[str, str]]] = {}
    for role in roles:
        for label in role["metadata"]["labels"]:
            if label.startswith("rbac.authorization.k8s.io/aggregate-to-"):
                given.setdefault(label.rpartition("-")[2], set()).update((r, v) for _, r, v, _ in rights(role))
    reads = {(f"{k}{s}", v) for k in ("modelversions", "loraadapters") for s in ("", "/status") for v in READ}
    writes = {
        (kind, verb)
        for kind in ("modelversions", "loraadapters")
        for verb in ("create", "update", "patch", "delete", "deletecollection")
    }
    assert given == {"view": reads, "edit": reads | writes, "admin": reads | writes}


def test_definitions_are_those_of_crds(charts: Charts) -> None:
    rendered = {o["metadata"]["name"]: o for o in of_kind(charts.template(CHART), "CustomResourceDefinition")}
    assert len(rendered) == 2
    for path in (REPOSITORY / "crds").glob("modelswap.dev_*.yaml"):
        source = yaml.safe_load(path.read_text())
        found = rendered[source["metadata"]["name"]]
        assert found["spec"] == source["spec"]
        assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize(("crds", "count"), [({"enabled": False}, 0), ({"keep": False}, 2)])
def test_definitions_can_be_left_out_or_let_go(charts: Charts, crds: dict[str, Any], count: int) -> None:
    rendered = of_kind(charts.template(CHART, {"crds": crds}), "CustomResourceDefinition")
    assert len(rendered) == count
    assert not any("annotations" in o["metadata"] for o in rendered)


def test_one_replica_is_recreated_and_more_roll(charts: Charts) -> None:
    assert one(charts.template(CHART), "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert one(charts.template(CHART, {"replicas": 2}), "Deployment")["spec"]["strategy"] == {"type": "RollingUpdate"}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"replicas": 2, "leaderElection": {"enabled": False}}, "two operators must not decide at once"),
        ({"leaderElection": {"leaseSeconds": 10, "renewSeconds": 10}}, "renewSeconds must be below"),
        ({"leaderElection": {"renewSeconds": 5, "retrySeconds": 5}}, "above 1.2 times leaderElection.retrySeconds"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name is required"),
    ],
)
def test_values_that_contradict_each_other_are_refused(charts: Charts, values: dict[str, Any], word: str) -> None:
    done = charts.try_template(CHART, values)
    assert done.returncode != 0
    assert word in done.stderr


def test_network_policy_admits_metrics_and_lets_the_operator_reach_engine_values(charts: Charts) -> None:
    policy = one(charts.template(CHART, {"watch": {"namespaces": ["a"]}}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == ["http"]
    slot = {"matchExpressions": [{"key": "modelswap.dev/slot", "operator": "Exists"}]}
    assert policy["egress"][-1] == {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "a"}}, "podSelector": slot}]
    }
    reached = {port["port"] for rule in policy["egress"][:-1] for port in rule["ports"]}
    assert reached == {53, 443, 6443}
    collector = {"to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}], "ports": [{"port": 4318, "protocol": "TCP"}]}
    more = one(charts.template(CHART, {"networkPolicy": {"egress": [collector]}}), "NetworkPolicy")["spec"]["egress"]
    assert more[-1] == collector


def test_image_by_digest_wins_over_the_tag(charts: Charts) -> None:
    digest = "sha256:" + "0" * 64
    pod = next(pod_templates(charts.template(CHART, {"image": {"tag": "x", "digest": digest}})))
    assert pod["spec"]["containers"][0]["image"] == f"modelswap/operator@{digest}"
