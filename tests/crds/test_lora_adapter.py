"""What the API server accepts as a LoRAAdapter, and what it refuses."""

from typing import Any

import pytest

from tests.support.custom import DIGEST, Namespace, lora_adapter

pytestmark = pytest.mark.api
OTHER = "sha256:" + "f" * 64


@pytest.mark.parametrize(
    "spec",
    [
        {"sources": [{"uri": "file:///a", "digest": DIGEST, "baseDigest": OTHER}, {"uri": "file:///b"}]},
        {"sources": [{"uri": "s3://models/a", "credentialsRef": {"name": "adapters"}}]},
        {"placement": {"pods": "All"}},
        {"placement": {"pods": 3}},
        {"service": {"name": "support", "port": 80}},
        {"pinned": True, "drainTimeoutSeconds": 0, "suspend": True},
    ],
    ids=str,
)
def test_whole_schema_is_accepted(namespace: Namespace, spec: dict[str, Any]) -> None:
    wanted = lora_adapter(**spec)
    assert wanted["spec"].items() <= namespace.create(wanted)["spec"].items()


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        ({"adapterName": ""}, "spec.adapterName", "at least 1 chars long"),
        ({"modelRef": {"name": None}}, "spec.modelRef.name", "Required value"),
        ({"sources": []}, "spec.sources", "should have at least 1 items"),
        ({"sources": [{"uri": "relative"}]}, "spec.sources[0].uri", "should match"),
        (
            {"sources": [{"uri": "ftp://host/a"}]},
            "spec.sources[0].uri",
            "the scheme is not one of file, pvc, s3",
        ),
        ({"sources": [{"uri": "file://host/a"}]}, "spec.sources[0].uri", "a file URI has no host"),
        ({"sources": [{"uri": "file:///a/../b"}]}, "spec.sources[0].uri", "must not contain '..' segments"),
        ({"sources": [{"uri": "file:///a", "digest": "x"}]}, "spec.sources[0].digest", "should match"),
        (
            {"sources": [{"uri": "file:///a"}, {"uri": "file:///b"}]},
            "spec.sources",
            "must not name the same baseDigest twice, and only one entry may go without",
        ),
        (
            {"sources": [{"uri": "file:///a", "baseDigest": DIGEST}, {"uri": "file:///b", "baseDigest": DIGEST}]},
            "spec.sources",
            "must not name the same baseDigest twice",
        ),
        (
            {"sources": [{"uri": "pvc://claim/a", "credentialsRef": {"name": "adapters"}}]},
            "spec.sources[0].credentialsRef",
            "mounted folders (file://, pvc://) need no credentials",
        ),
        ({"sources": [{"uri": "s3://m/a", "credentialsRef": {}}]}, "spec.sources[0].credentialsRef", "Required value"),
        ({"placement": {"pods": 0}}, "spec.placement.pods", "must be All or a number from 1 to 10000"),
        ({"placement": {"pods": "Some"}}, "spec.placement.pods", "must be All or a number"),
        ({"service": {"name": "1st"}}, "spec.service.name", "should match"),
        ({"service": {"port": 0}}, "spec.service.port", "greater than or equal to 1"),
        ({"drainTimeoutSeconds": -1}, "spec.drainTimeoutSeconds", "greater than or equal to 0"),
        ({"misspelled": 1}, "spec.misspelled", "unknown field"),
    ],
    ids=str,
)
def test_malformed_fields_are_named(namespace: Namespace, spec: dict[str, Any], field: str, message: str) -> None:
    answer = namespace.refused(lora_adapter(**spec))
    assert field in answer
    assert message in answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapterName": "other"}, "adapterName is immutable: another name is another LoRAAdapter"),
        ({"modelRef": {"name": "other"}}, "modelRef is immutable: create a LoRAAdapter for the other slot"),
    ],
    ids=str,
)
def test_which_adapter_of_which_slot_it_is_does_not_change(
    namespace: Namespace, change: dict[str, Any], message: str
) -> None:
    namespace.create(lora_adapter("kept"))
    assert message in namespace.refused(lora_adapter("kept", **change))


def test_defaults_are_in_the_schema(namespace: Namespace) -> None:
    stored = namespace.create(lora_adapter())
    assert stored["spec"] == {
        "adapterName": "support",
        "modelRef": {"name": "slot"},
        "sources": [{"uri": "file:///models/support"}],
        "placement": {"pods": "All"},
        "pinned": False,
        "drainTimeoutSeconds": 60,
        "suspend": False,
    }
    assert stored["status"] == {"observedGeneration": -1}
