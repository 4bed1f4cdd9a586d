"""What the kubectl plugin concludes from objects: who writes them, which way leads back, why a slot is not Ready."""

import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelswap_engine.protocol.assignment import Assignment
from modelswap_operator.api.modelversion import VersionCount
from modelswap_operator.cli import views
from modelswap_operator.cli.asking import STRANGERS, one_of_each
from modelswap_operator.cli.doctor import write_archive
from modelswap_operator.cli.engines import ControlPort, account_of, control_port
from modelswap_operator.cli.failures import PluginError
from modelswap_operator.cli.findings import Facts, Level, findings
from modelswap_operator.cli.slots import Slot, change_to, manager_of, patch_to, revision_to_return_to, slot_of

A, B, C = ("sha256:" + letter * 64 for letter in "abc")


def revision(number: int, version: str, digest: str, result: str = "Succeeded") -> dict[str, Any]:
    return {
        "revision": number,
        "version": version,
        "digest": digest,
        "source": f"file:///models/{version}",
        "result": result,
    }


def condition(kind: str, status: str, reason: str, message: str = "", generation: int = 3) -> dict[str, Any]:
    found = {"type": kind, "status": status, "reason": reason, "message": message}
    return {**found, "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z"}


READY = [condition("Ready", "True", "Succeeded", "2/2 pods serve 1.1")]
STALLED = [
    condition("Ready", "False", "ManifestMismatch", "1.2 refused"),
    condition("Stalled", "True", "ManifestMismatch", "1.2 refused"),
]
DRIFTED = [*READY, condition("SourceDrifted", "True", "SourceDrifted", "s3://b/1.1 holds sha256:9 now")]


def slot(
    *,
    version: str = "1.1",
    history: list[dict[str, Any]] | None = None,
    conditions: list[dict[str, Any]] | None = None,
    pods: list[dict[str, Any]] | None = None,
    meta: dict[str, Any] | None = None,
    observed: int = 3,
    **spec: Any,
) -> Slot:
    source = {"uri": f"file:///models/{version}"}
    return slot_of(
        {
            "metadata": {"name": "chat", "namespace": "team", "uid": "uid-1", "generation": 3, **(meta or {})},
            "spec": {"servedModelName": "chat", "version": version, "source": source, **spec},
            "status": {
                "observedGeneration": observed,
                "history": history or [],
                "conditions": READY if conditions is None else conditions,
                "pods": pods or [],
            },
        }
    )


def pod(name: str = "chat-1", *, ready: bool = True, port: str = "modelswap", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": {"modelswap.dev/slot": "chat"}},
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "args": ["--allowed-subject=system:serviceaccount:modelswap-system:modelswap"],
                    "ports": [{"name": port, "containerPort": 8001}],
                }
            ]
        },
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}], **status},
    }


OPERATOR = {
    "metadata": {"name": "op", "namespace": "ms"},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}


# Who writes an object.


@pytest.mark.parametrize(
    ("meta", "who"),
    [
        ({}, ""),
        (
            {"labels": {"kustomize.toolkit.fluxcd.io/name": "apps", "kustomize.toolkit.fluxcd.io/namespace": "flux"}},
            "Flux (Kustomization flux/apps)",
        ),
        ({"labels": {"helm.toolkit.fluxcd.io/name": "chat"}}, "Flux (HelmRelease ?/chat)"),
        ({"annotations": {"argocd.argoproj.io/tracking-id": "shop:modelswap.dev/x:y"}}, "Argo CD (application shop)"),
        ({"labels": {"argocd.argoproj.io/instance": "shop"}}, "Argo CD (application shop)"),
        (
            {"annotations": {"meta.helm.sh/release-name": "r", "meta.helm.sh/release-namespace": "n"}},
            "Helm (release n/r)",
        ),
        ({"labels": {"app.kubernetes.io/managed-by": "people"}}, ""),
    ],
)
def test_who_writes_an_object_is_told_by_the_marks_it_leaves(meta: dict[str, Any], who: str) -> None:
    assert manager_of(meta) == who


# The way back.


def test_the_way_back_is_the_last_good_version_that_is_not_wanted_now() -> None:
    found = slot(
        version="1.2",
        history=[
            revision(9, "1.2", C, "Failed"),
            revision(8, "1.2", C, "RolledBack"),
            revision(7, "1.1", B),
            revision(5, "1.0", A),
        ],
    )
    back = revision_to_return_to(found, None)
    assert (back.revision, back.version) == (7, "1.1")
    assert patch_to(back) == {"spec": {"version": "1.1", "source": {"uri": "file:///models/1.1", "digest": B}}}


def test_a_good_version_leads_back_to_the_one_before() -> None:
    assert revision_to_return_to(slot(history=[revision(7, "1.1", B), revision(5, "1.0", A)]), None).version == "1.0"


def test_a_pin_is_taken_away_where_the_revision_has_none() -> None:
    back = revision_to_return_to(slot(history=[revision(5, "1.0", "")]), 5)
    assert patch_to(back)["spec"]["source"] == {"uri": "file:///models/1.0", "digest": None}


def test_what_is_written_is_refused_when_the_spec_has_changed_since_and_only_then() -> None:
    now = slot(history=[revision(7, "1.1", B), revision(5, "1.0", A)])
    guard, *changes = change_to(revision_to_return_to(now, None), now)
    assert guard == {"op": "test", "path": "/metadata/generation", "value": 3}
    assert changes == [
        {"op": "replace", "path": "/spec/version", "value": "1.0"},
        {"op": "replace", "path": "/spec/source/uri", "value": "file:///models/1.0"},
        {"op": "add", "path": "/spec/source/digest", "value": A},
    ]


def test_a_bundle_is_its_owners_alone_whatever_was_there(tmp_path: Path) -> None:
    secret, path = tmp_path / "elsewhere", tmp_path / "bundle.tar.gz"
    secret.write_text("untouched")
    path.symlink_to(secret)
    write_archive(path, {"a.txt": "x"}, folder="bundle", at=0)
    assert (secret.read_text(), path.is_symlink()) == ("untouched", False)
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["bundle/a.txt"]


@pytest.mark.parametrize(("wanted", "says"), [(None, "no other version that was served"), (4, "no revision 4")])
def test_without_a_way_back_it_says_so(wanted: int | None, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        revision_to_return_to(slot(history=[revision(7, "1.1", B)]), wanted)


# Where pods are reached.


def test_port_and_account_are_found_in_the_pod_itself() -> None:
    assert control_port(pod()) == ControlPort(number=8001, tls=False)
    assert control_port(pod(port="modelswap-tls")) == ControlPort(number=8001, tls=True)
    assert account_of(pod()) == ("modelswap-system", "modelswap")
    assert control_port(pod(port="http")) is None
    assert account_of({"spec": {"containers": [{"name": "c"}]}}) is None


def test_one_pod_is_asked_for_each_version_that_is_served() -> None:
    status = slot(
        pods=[{"name": f"chat-{n}", "state": "Serving", "digest": A if n < 3 else B} for n in range(5)]
    ).status
    status = msgspec.structs.replace(status, versions=(VersionCount(digest=A, pods=30), VersionCount(digest=B, pods=2)))
    found = one_of_each([pod(f"chat-{n}") for n in range(5)], status)
    assert [(thing["metadata"]["name"], count) for thing, count in found] == [("chat-0", 30), ("chat-3", 2)]
    strangers = one_of_each([pod(f"other-{n}") for n in range(9)], status)
    assert len(strangers) == STRANGERS


# Findings.


AT_ZERO = condition("Ready", "True", "ScaledToZero", "no pod has the label")


def adapter(said: str, generation: int = 3) -> dict[str, Any]:
    found = condition(said, "True", said, "s3://b/de holds sha256:9 now", generation)
    return {"metadata": {"name": "de", "namespace": "team", "generation": 3}, "status": {"conditions": [found]}}


def levels(facts: Facts) -> list[tuple[str, str]]:
    return [(finding.level.value, finding.text) for finding in findings(facts)]


def test_a_slot_that_is_well_says_only_that() -> None:
    assert levels(Facts(slot=slot(), pods=[pod()], operators=[OPERATOR])) == [
        ("ok", "chat is Ready: 2/2 pods serve 1.1")
    ]


def texts(facts: Facts) -> str:
    return "\n".join(f"{f.level.value}: {f.text} > {f.next}" for f in findings(facts))


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (Facts(slot=slot(conditions=[], observed=-1), pods=[pod()], operators=[]), "problem: no pod of an operator"),
        (
            Facts(slot=slot(conditions=[], observed=-1), pods=[pod()], operators=[OPERATOR]),
            "problem: an operator runs, and has said nothing about team/chat > does it watch namespace team",
        ),
        (
            Facts(slot=slot(), pods=[pod()], operators=[{**OPERATOR, "status": {}}]),
            "problem: no operator is ready (ms/op)",
        ),
        (
            Facts(slot=slot(conditions=STALLED), pods=[pod()], operators=[OPERATOR]),
            "problem: Stalled, ManifestMismatch: 1.2 refused > change the spec, or go back: kubectl modelswap rollback",
        ),
        (
            Facts(slot=slot(conditions=DRIFTED), pods=[pod()], operators=[OPERATOR]),
            "problem: SourceDrifted: s3://b/1.1 holds sha256:9 now",
        ),
        (
            Facts(slot=slot(), pods=[pod()], operators=[OPERATOR], adapters=[adapter("SourceDrifted")]),
            "problem: LoRAAdapter de, SourceDrifted: s3://b/de holds sha256:9 now > put the old content back",
        ),
        (
            Facts(slot=slot(conditions=[AT_ZERO]), pods=[], operators=[OPERATOR]),
            "note: no pod in namespace team has the label",
        ),
        (
            Facts(slot=slot(conditions=[], suspend=True), pods=[pod()], operators=[OPERATOR]),
            "note: spec.suspend is true",
        ),
        (Facts(slot=slot(), pods=[], operators=[OPERATOR]), "problem: no pod in namespace team has the label"),
        (Facts(slot=slot(), pods=[pod(port="http")], operators=[OPERATOR]), "no port named modelswap or"),
        (
            Facts(
                slot=slot(pods=[{"name": "chat-1", "state": "Quarantined", "message": "unproved"}]),
                pods=[pod()],
                operators=[OPERATOR],
            ),
            "problem: pod chat-1 is Quarantined: unproved",
        ),
        (
            Facts(
                slot=slot(), pods=[pod()], operators=[OPERATOR], assignment=Assignment(owner_uid="uid-0", revision=3)
            ),
            "problem: configmap modelswap-chat belongs to another life of chat",
        ),
        (
            Facts(slot=slot(conditions=[]), pods=[pod()], operators=[OPERATOR], readiness={"chat-1": "Starting"}),
            "note: pod chat-1 is not ready; it says: Starting",
        ),
        (Facts(slot=slot(), pods=[pod()], operators=None, unseen=["forbidden"]), "unknown: forbidden"),
    ],
)
def test_each_cause_is_named_with_its_next_step(facts: Facts, says: str) -> None:
    assert says in texts(facts)


def test_containers_that_wait_or_were_killed_are_named() -> None:
    broken = pod(
        containerStatuses=[
            {
                "name": "engine",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": {"reason": "OOMKilled", "finishedAt": "then"}},
            }
        ]
    )
    said = texts(Facts(slot=slot(), pods=[broken], operators=[OPERATOR]))
    assert "problem: pod chat-1, container engine: CrashLoopBackOff back-off > kubectl logs chat-1 -c engine" in said
    assert "problem: pod chat-1, container engine was killed for want of memory (then) > raise resources.limits" in said


def test_an_adapter_whose_source_has_not_moved_is_no_finding() -> None:
    """Nor is what was said of an older spec."""
    for quiet in (adapter("Ready"), adapter("SourceDrifted", generation=2)):
        facts = Facts(slot=slot(), pods=[pod()], operators=[OPERATOR], adapters=[quiet])
        assert levels(facts) == [("ok", "chat is Ready: 2/2 pods serve 1.1")]


def test_problems_come_first() -> None:
    facts = Facts(slot=slot(conditions=[]), pods=[], operators=None, unseen=["forbidden"])
    found = [finding.level for finding in findings(facts)]
    assert found == sorted(found, key=list(Level).index)


# What is shown.


def test_the_tree_shows_slot_pods_and_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    adapter = {
        "metadata": {"name": "de", "namespace": "team"},
        "spec": {"adapterName": "support-de"},
        "status": {"conditions": [condition("Ready", "True", "Succeeded", "loaded on 2 pods")]},
    }
    pods = [{"name": "chat-1", "state": "Refused", "version": "1.1", "digest": B, "message": "tensor x [bad]"}]
    views.show(views.tree(slot(conditions=STALLED, pods=pods), [adapter]))
    said = capsys.readouterr().out
    assert "team/chat  Stalled: ManifestMismatch  1.2 refused" in said
    assert "chat-1  Refused  1.1  sha256:bbbbbbbbbbbb  tensor x [bad]" in said  # brackets are no markup
    assert "support-de  Ready  loaded on 2 pods" in said
    assert "\x1b[" not in said


def test_what_an_older_generation_said_is_not_believed() -> None:
    old = slot(conditions=[condition("Ready", "True", "Succeeded", "all", generation=2)], observed=2)
    assert not old.ready
    assert old.message == "no operator has seen this generation yet"
