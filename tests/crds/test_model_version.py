"""What the API server accepts as a ModelVersion, what it refuses, and what it says then."""

from typing import Any

import pytest

from tests.support.custom import DIGEST, Namespace, model_version

pytestmark = pytest.mark.api


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        (
            {"source": {"credentialsRef": {"name": "s3-reader"}}},
            "spec.source.credentialsRef",
            "source.credentialsRef: mounted folders (file://, pvc://) need no credentials",
        ),
    ],
    ids=str,
)
def test_what_is_forbidden_says_so(namespace: Namespace, spec: dict[str, Any], field: str, message: str) -> None:
    answer = namespace.refused(model_version(**spec))
    assert f"{field}: Forbidden: {message}" in answer


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        ({"prefetch": [{"uri": "ftp://host/chat"}]}, "spec.prefetch[0].uri", "the scheme is not one of file, pvc, s3"),
        ({"source": {"uri": "ftp://host/chat"}}, "spec.source.uri", 'the scheme "ftp" is not one of file, pvc, s3'),
        ({"source": {"uri": "https://me:word@host/chat"}}, "spec.source.uri", "must hold no user, password"),
        ({"source": {"uri": "https://host/chat?X-Signature=1"}}, "spec.source.uri", "must hold no user, password"),
        ({"source": {"uri": "/models/chat"}}, "spec.source.uri", "should match"),
        ({"source": {"uri": "FILE:///models/chat"}}, "spec.source.uri", "should match"),
        ({"source": {"uri": "file:///models/a b"}}, "spec.source.uri", "should match"),
        ({"source": {"uri": "file://host/models"}}, "spec.source.uri", "a file URI has no host"),
        ({"source": {"uri": "file:///models/../etc"}}, "spec.source.uri", "must not contain '..' segments"),
        ({"source": {"uri": "file:///models/.."}}, "spec.source.uri", "must not contain '..' segments"),
        ({"source": {"uri": None}}, "spec.source.uri", "Required value"),
        ({"source": {"digest": "sha256:abc"}}, "spec.source.digest", "should match"),
        ({"source": {"digest": "md5:" + "0" * 64}}, "spec.source.digest", "should match"),
        ({"source": {"digest": DIGEST.upper()}}, "spec.source.digest", "should match"),
        ({"servedModelName": ""}, "spec.servedModelName", "should be at least 1 chars long"),
        ({"servedModelName": "no spaces"}, "spec.servedModelName", "should match"),
        ({"version": "1/0"}, "spec.version", "should match"),
        ({"version": "v" * 64}, "spec.version", "may not be more than 63"),
        ({"version": None}, "spec.version", "Required value"),
        ({"rollout": {"maxUnavailable": 0}}, "spec.rollout.maxUnavailable", "must be 1 to 10000"),
        ({"rollout": {"maxUnavailable": -1}}, "spec.rollout.maxUnavailable", "must be 1 to 10000"),
        ({"rollout": {"maxUnavailable": "0%"}}, "spec.rollout.maxUnavailable", "or a percentage from 1% to 100%"),
        ({"rollout": {"maxUnavailable": "101%"}}, "spec.rollout.maxUnavailable", "or a percentage from 1% to 100%"),
        ({"rollout": {"maxUnavailable": "1"}}, "spec.rollout.maxUnavailable", "or a percentage from 1% to 100%"),
        ({"rollout": {"maxUnavailable": 10001}}, "spec.rollout.maxUnavailable", "must be 1 to 10000"),
        ({"rollout": {"maxUnavailable": "two"}}, "spec.rollout.maxUnavailable", "or a percentage from 1% to 100%"),
        ({"rollout": {"canary": {"pods": 101}}}, "spec.rollout.canary.pods", "less than or equal to 100"),
        ({"rollout": {"canary": {"pods": -1}}}, "spec.rollout.canary.pods", "greater than or equal to 0"),
        ({"rollout": {"canary": {"soakSeconds": -1}}}, "spec.rollout.canary.soakSeconds", "greater than or equal to 0"),
        ({"rollout": {"canary": {"minRequests": 5}}}, "spec.rollout.canary.minRequests", "needs rollout.canary.pods"),
        (
            {"rollout": {"canary": {"maxErrorPercent": 101}}},
            "spec.rollout.canary.maxErrorPercent",
            "less than or equal",
        ),
        ({"rollout": {"progressDeadlineSeconds": 0}}, "spec.rollout.progressDeadlineSeconds", "greater than or equal"),
        ({"rollout": {"onFailure": "Shrug"}}, "spec.rollout.onFailure", 'supported values: "Rollback", "Halt"'),
        ({"traffic": {"mode": "Sneak"}}, "spec.traffic.mode", "supported values"),
        ({"traffic": {"timeoutSeconds": 0}}, "spec.traffic.timeoutSeconds", "greater than or equal to 1"),
        ({"traffic": {"onTimeout": "Wait"}}, "spec.traffic.onTimeout", "supported values"),
        ({"loading": {"mode": "Half"}}, "spec.loading.mode", "supported values"),
        ({"loading": {"verify": "Never"}}, "spec.loading.verify", "supported values"),
        ({"weights": "Shared"}, "spec.weights", "supported values"),
        ({"recovery": {"engineRestart": "Maybe"}}, "spec.recovery.engineRestart", "supported values"),
        ({"verification": {"keys": ["a/b"]}}, "spec.verification.keys", "should match"),
        ({"verification": {"keys": ["a", "a"]}}, "spec.verification.keys", "Duplicate"),
        ({"revisionHistoryLimit": 51}, "spec.revisionHistoryLimit", "less than or equal to 50"),
        ({"misspelled": True}, "spec.misspelled", "unknown field"),
        ({"traffic": {"misspelled": True}}, "spec.traffic.misspelled", "unknown field"),
    ],
    ids=str,
)
def test_malformed_fields_are_named(namespace: Namespace, spec: dict[str, Any], field: str, message: str) -> None:
    answer = namespace.refused(model_version(**spec))
    assert field in answer
    assert message in answer


@pytest.mark.parametrize(
    "spec",
    [
        {"servedModelName": "meta-llama/Llama-3.2:1b@x"},
        {"version": "2026.11.29-rc.1+build7"},
        {"source": {"uri": "file:///models/with%20space/a..b/v1.0", "digest": DIGEST}},
        {"rollout": {"maxUnavailable": 3, "onFailure": "Halt", "progressDeadlineSeconds": 30}},
        {"rollout": {"maxUnavailable": "100%"}},
        {"rollout": {"maxUnavailable": "1%", "canary": {"pods": 0, "soakSeconds": 60}}},
        {"rollout": {"canary": {"pods": 2, "soakSeconds": 0, "minRequests": 500, "maxErrorPercent": 0}}},
        {"traffic": {"mode": "Recompute"}},
        *(
            {"traffic": {"onTimeout": action, "timeoutSeconds": 5}}
            for action in ("CancelSwap", "RecomputeRequests", "AbortRequests")
        ),
        {"loading": {"mode": "Diff", "verify": "Strict", "keepPrevious": False}},
        {"loading": {"mode": "Full"}},
        {"checks": {"prompts": [{"prompt": "Hello"}, {"prompt": "2 + 2 =", "maxLogprobDelta": "0.05"}]}},
        {"checks": {"prompts": []}, "prefetch": [], "adapters": {"onIncompatible": "Unload"}, "weights": "Managed"},
        {"weights": "External"},
        {"recovery": {"engineRestart": "Allowed"}},
        {"verification": {"required": True, "keys": ["release.pub", "..data-ca.crt"]}},
        {"recovery": {"engineRestart": "Never"}},
        {"revisionHistoryLimit": 0, "suspend": True},
        {"source": {"uri": "s3://bucket/chat/1.1", "credentialsRef": {"name": "reader"}}},
        {"prefetch": [{"uri": "s3://bucket/chat/1.2", "digest": DIGEST, "credentialsRef": {"name": "reader"}}]},
        *(
            {"source": {"uri": uri}}
            for uri in (
                "pvc://models/chat",
                "hf://org/chat@main",
                "oci://registry:5000/chat:1.1@" + DIGEST,
                "az://a/c/chat",
            )
        ),
    ],
    ids=str,
)
def test_everything_this_release_supports_is_accepted(namespace: Namespace, spec: dict[str, Any]) -> None:
    wanted = model_version(**spec)
    stored = namespace.create(wanted)
    for field, value in wanted["spec"].items():
        if isinstance(value, dict):
            assert value.items() <= stored["spec"][field].items() or field == "rollout"
        else:
            assert stored["spec"][field] == value


def test_defaults_are_in_the_schema(namespace: Namespace) -> None:
    stored = namespace.create(model_version())
    assert stored["spec"] == {
        "servedModelName": "chat",
        "version": "1.0",
        "source": {"uri": "file:///models/chat-1.0"},
        "rollout": {
            "stageAhead": True,
            "maxUnavailable": 1,
            "canary": {"pods": 0, "soakSeconds": 60, "minRequests": 0, "maxErrorPercent": 1},
            "progressDeadlineSeconds": 600,
            "onFailure": "Rollback",
        },
        "traffic": {"mode": "Drain", "timeoutSeconds": 60, "onTimeout": "CancelSwap"},
        "loading": {"mode": "Auto", "verify": "Standard", "keepPrevious": True},
        "checks": {"prompts": []},
        "verification": {"required": False},
        "adapters": {"onIncompatible": "Block"},
        "recovery": {"engineRestart": "Allowed"},
        "weights": "Managed",
        "prefetch": [],
        "revisionHistoryLimit": 10,
        "suspend": False,
    }


def test_a_new_object_is_in_progress_before_any_operator_saw_it(namespace: Namespace) -> None:
    assert namespace.create(model_version())["status"] == {"observedGeneration": -1}


def test_a_name_that_no_label_can_hold_is_refused(namespace: Namespace) -> None:
    answer = namespace.refused(model_version("s" * 64))
    assert "metadata.name must be at most 63 characters: pods name it in the label modelswap.dev/slot" in answer
    namespace.create(model_version("s" * 63))


def test_served_model_name_never_changes(namespace: Namespace) -> None:
    namespace.create(model_version())
    answer = namespace.refused(model_version(servedModelName="other"))
    assert 'spec.servedModelName: Forbidden: spec.servedModelName is immutable (it is "chat"): create another' in answer


@pytest.mark.parametrize("source", [{"uri": "file:///models/chat-1.1"}, {"digest": DIGEST}], ids=str)
def test_source_does_not_change_without_the_version(namespace: Namespace, source: dict[str, str]) -> None:
    namespace.create(model_version())
    answer = namespace.refused(model_version(source=source))
    assert 'spec.version: Invalid value: spec.source changed but spec.version is still "1.0": other weights' in answer


def test_version_does_not_change_without_the_source(namespace: Namespace) -> None:
    namespace.create(model_version())
    answer = namespace.refused(model_version(version="1.1"))
    assert 'spec.source: Invalid value: spec.version changed from "1.0" to "1.1" but spec.source did not' in answer


def test_version_and_source_change_together_and_back(namespace: Namespace) -> None:
    first, second = model_version(), model_version(version="1.1", source={"uri": "file:///models/chat-1.1"})
    created = namespace.create(first)
    assert namespace.replace(second)["metadata"]["generation"] == created["metadata"]["generation"] + 1
    assert namespace.replace(first)["spec"]["version"] == "1.0"


def test_other_fields_change_freely(namespace: Namespace) -> None:
    namespace.create(model_version())
    stored = namespace.replace(model_version(suspend=True, traffic={"mode": "Recompute"}))
    assert stored["spec"]["suspend"] is True
    assert stored["spec"]["traffic"]["mode"] == "Recompute"
