"""The pages lead somewhere: links between files of this checkout, and the numbers of decisions."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cache import REPOSITORY

PAGES = sorted(
    path
    for place in ("*.md", "docs/**/*.md", "charts/*/README.md", "examples/**/*.md", "contrib/**/*.md")
    for path in REPOSITORY.glob(place)
)
_LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_between_files_lead_to_files(page: Path) -> None:
    broken = []
    for link in _LINK.findall(page.read_text()):
        target = link.partition("#")[0]
        if target and "://" not in target and not target.startswith("mailto:"):
            broken += [] if (page.parent / target).exists() else [link]
    assert broken == []


def test_each_decision_has_a_number_of_its_own() -> None:
    files = sorted((REPOSITORY / "docs/adr").glob("[0-9]*.md"))
    numbers = Counter(file.name[:4] for file in files)
    assert [number for number, count in numbers.items() if count > 1] == []
    for file in files[1:]:
        assert file.read_text().startswith(f"# {int(file.name[:4])}. "), file.name
