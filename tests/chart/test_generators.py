"""What is generated is up to date, and the generators notice when it is not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cache import HACK, REPOSITORY


def generate(script: str, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HACK / script), "--root", str(root), *arguments]
    return subprocess.run(command, text=True, capture_output=True, check=False, timeout=60)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("crds", "charts"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    return tmp_path


@pytest.mark.parametrize("script", ["gen_chart_crds.py", "gen_chart_readme.py", "gen_api_docs.py"])
def test_generated_files_are_up_to_date(script: str) -> None:
    done = generate(script, REPOSITORY, "--check")
    assert done.returncode == 0, done.stderr


def test_changed_definition_is_noticed_and_brought_over(tree: Path) -> None:
    source = tree / "crds" / "modelswap.dev_loraadapters.yaml"
    source.write_text(source.read_text().replace("shortNames: [lora]", "shortNames: [adapter]"))
    done = generate("gen_chart_crds.py", tree, "--check")
    assert done.returncode == 1
    assert "charts/modelswap/templates/crds/modelswap.dev_loraadapters.yaml is stale" in done.stderr
    assert generate("gen_chart_crds.py", tree).returncode == 0
    assert "shortNames: [adapter]" in (tree / "charts/modelswap/templates/crds" / source.name).read_text()
    assert generate("gen_chart_crds.py", tree, "--check").returncode == 0


def test_definition_that_is_gone_is_removed(tree: Path) -> None:
    (tree / "crds" / "modelswap.dev_loraadapters.yaml").unlink()
    assert generate("gen_chart_crds.py", tree, "--check").returncode == 1
    assert generate("gen_chart_crds.py", tree).returncode == 0
    assert not (tree / "charts/modelswap/templates/crds/modelswap.dev_loraadapters.yaml").exists()


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (
            "description: Where the checkpoint is",
            "description: '{{ x }}' Where the checkpoint is",
            "as a template",
        ),
        ("metadata:\n  name: ", "metadata: {}\nx:\n  name: ", "has no line 'metadata:'"),
        ("metadata:\n  name: ", "metadata:\n  labels: {}\n  name: ", "must hold the name only"),
    ],
)
def test_definition_that_cannot_be_wrapped_is_refused(tree: Path, old: str, new: str, word: str) -> None:
    source = tree / "crds" / "modelswap.dev_modelversions.yaml"
    source.write_text(source.read_text().replace(old, new, 1))
    done = generate("gen_chart_crds.py", tree)
    assert done.returncode == 1
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_changed_value_makes_the_readme_stale(tree: Path) -> None:
    values = tree / "charts/modelswap/values.yaml"
    values.write_text(values.read_text().replace("replicas: 1", "replicas: 3"))
    done = generate("gen_chart_readme.py", tree, "--check")
    assert done.returncode == 1
    assert "charts/modelswap/README.md is stale" in done.stderr
    assert generate("gen_chart_readme.py", tree).returncode == 0
    assert "| `replicas` | `3` |" in (tree / "charts/modelswap/README.md").read_text()


def test_value_without_a_description_is_refused(tree: Path) -> None:
    values = tree / "charts/modelswap/values.yaml"
    values.write_text(values.read_text() + "undescribed: 1\n")
    done = generate("gen_chart_readme.py", tree)
    assert done.returncode == 1
    assert "undescribed has no '# -- ' comment" in done.stderr
