"""The definitions themselves: every field explained and bounded, names, columns, and the examples."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cache import REPOSITORY
from tests.support.custom import DEFINITIONS, Namespace, lora_adapter, model_version

Schema = dict[str, Any]
FILES = sorted((REPOSITORY / "crds").glob("modelswap.dev_*.yaml"))
EXAMPLES = sorted(p for p in (REPOSITORY / "examples").glob("*.yaml") if "apiVersion: modelswap.dev" in p.read_text())


def definition(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def fields(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from fields(child, f"{path}.{name}")
    if "items" in node:
        yield f"{path}[]", node["items"]
        yield from fields(node["items"], f"{path}[]")


def schema(path: Path) -> Schema:
    found: Schema = definition(path)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@each_file
def test_every_field_is_explained_and_bounded(path: Path) -> None:
    for name, field in fields(schema(path)):
        if name in (".metadata", ".apiVersion", ".kind"):
            continue
        assert field.get("description", "").strip().endswith("."), f"{name} has no description"
        kind = field.get("type")
        if kind == "string" or field.get("x-kubernetes-int-or-string"):
            assert "maxLength" in field, f"{name} has no maxLength"
        if kind == "array":
            assert "maxItems" in field, f"{name} has no maxItems"
            assert "x-kubernetes-list-type" in field, f"{name} has no list type"
        if kind == "integer":
            assert field.get("format") in ("int32", "int64"), f"{name} has no format"
        if kind == "object":
            assert field.get("properties"), f"{name} is an object without fields"
        assert "x-kubernetes-preserve-unknown-fields" not in field, name


@each_file
def test_every_rule_says_what_is_wrong(path: Path) -> None:
    nodes = [("", schema(path)), *fields(schema(path))]
    rules = [(name, rule) for name, node in nodes for rule in node.get("x-kubernetes-validations", [])]
    assert rules
    for name, rule in rules:
        assert rule.get("message"), f"{name}: {rule['rule']}"
        assert rule.get("reason") in ("FieldValueForbidden", "FieldValueInvalid"), f"{name}: {rule['rule']}"


@each_file
def test_names(path: Path) -> None:
    found = definition(path)
    assert found["metadata"]["name"] in DEFINITIONS
    assert found["spec"]["names"]["categories"] == ["modelswap"]  # not in "all": deleting all must not delete models
    assert found["spec"]["scope"] == "Namespaced"
    (version,) = found["spec"]["versions"]
    assert (version["name"], version["served"], version["storage"]) == ("v1alpha1", True, True)
    assert version["subresources"] == {"status": {}}


@pytest.mark.api
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_accepted(namespace: Namespace, path: Path) -> None:
    namespace.server.kubectl("apply", "-n", namespace.name, "-f", str(path))


@pytest.mark.api
def test_the_next_version_of_the_example_is_an_allowed_change(namespace: Namespace) -> None:
    for name in ("modelversion", "modelversion-next", "modelversion"):
        namespace.server.kubectl("apply", "-n", namespace.name, "-f", str(REPOSITORY / "examples" / f"{name}.yaml"))


@pytest.mark.api
def test_short_names_and_category(namespace: Namespace) -> None:
    namespace.create(model_version())
    namespace.create(lora_adapter())
    names = namespace.server.kubectl("get", "modelswap", "-n", namespace.name, "-o", "name").split()
    assert names == ["loraadapter.modelswap.dev/adapter", "modelversion.modelswap.dev/slot"]
    assert namespace.table("mv", "-o", "name") == ["modelversion.modelswap.dev/slot"]
    assert namespace.table("lora", "-o", "name") == ["loraadapter.modelswap.dev/adapter"]
    assert "slot" not in namespace.server.kubectl("get", "all", "-n", namespace.name)


@pytest.mark.api
def test_objects_are_found_by_field(namespace: Namespace) -> None:
    namespace.create(model_version("one", servedModelName="a"))
    namespace.create(model_version("two", servedModelName="b"))
    found = namespace.table("mv", "--field-selector=spec.servedModelName=b", "-o", "name")
    assert found == ["modelversion.modelswap.dev/two"]
    namespace.create(lora_adapter(modelRef={"name": "one"}))
    assert namespace.table("lora", "--field-selector=spec.modelRef.name=one", "-o", "name")


@pytest.mark.api
@pytest.mark.parametrize("field", ["spec.traffic.onTimeout", "spec.source.digest", "status.history.bytesFetched"])
def test_explain(namespace: Namespace, field: str) -> None:
    # The server publishes what explain reads a moment after the kind is served; kubectl has no wait for that.
    text = namespace.server.kubectl("explain", f"modelversions.{field}")
    assert "DESCRIPTION:" in text
    assert "<empty>" not in text
