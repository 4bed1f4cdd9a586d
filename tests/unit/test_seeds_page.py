"""docs/seeds.md points at tests by their ids: every one of them is there."""

import ast
import re

import pytest

from tests.support.cache import REPOSITORY

_IDS = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", (REPOSITORY / "docs/seeds.md").read_text())))


@pytest.mark.parametrize("identity", _IDS)
def test_what_the_page_names_exists(identity: str) -> None:
    path, name = identity.split("::")
    names: set[str] = set()
    for node in ast.parse((REPOSITORY / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    assert name in names


@pytest.mark.parametrize("page", ["docs/seeds.md", "THREAT_MODEL.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.\w+)`", (REPOSITORY / page).read_text()))
    assert named
    roots = [REPOSITORY, REPOSITORY / "engine/modelswap_engine", REPOSITORY / "operator/modelswap_operator"]
    assert {name for name in named if not any((root / name).exists() for root in roots)} == set()


def test_each_system_has_a_test() -> None:
    page = (REPOSITORY / "docs/seeds.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| what it was")]
    assert rows
    for row in rows:
        assert "::test_" in row or "::Test" in row or "not there yet" in row, row
