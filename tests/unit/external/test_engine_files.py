"""What an engine's container gets of modelswap, through the command line; and that it runs without any dependency."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modelswap_engine.cli.main import app
from modelswap_engine.protocol.errors import BadRequest
from tests.support.cache import REPOSITORY
from tests.support.launcher import BARE_PYTHON, Launcher


def bare(files: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*BARE_PYTHON, "-m", *arguments], env={**os.environ, "PYTHONPATH": str(files)}, text=True, capture_output=True,
        check=False, timeout=60,
    )  # fmt: skip


def test_copied_files_run_with_the_standard_library_alone(tmp_path: Path) -> None:
    for _ in range(2):  # a restarted pod copies again
        assert CliRunner().invoke(app, ["engine-files", str(tmp_path / "files")]).exit_code == 0
    assert {entry.name for entry in (tmp_path / "files").iterdir()} == {"modelswap_engine", "modelswap.dist-info"}
    assert not list((tmp_path / "files").rglob("__pycache__"))
    for module in ("modelswap_engine.backends.launch", "modelswap_engine.backends.drain"):
        done = bare(tmp_path / "files", module, "--help")
        assert done.returncode == 0, done.stderr
        assert "--runtime-dir" in done.stdout


def test_an_engine_that_asks_what_is_installed_finds_our_half(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["engine-files", str(tmp_path)]).exit_code == 0
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (group,) = project["entry-points"]
    found = [point for dist in distributions(path=[str(tmp_path)]) for point in dist.entry_points]
    assert [(point.group, point.name, point.value) for point in found] == [
        (group, name, value) for name, value in project["entry-points"][group].items()
    ]
    assert {dist.name for dist in distributions(path=[str(tmp_path)])} == {
        project["name"]
    }  # seen once beside an installed one


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = CliRunner().invoke(app, ["engine-files", str(tmp_path / "file")])
    assert isinstance(done.exception, BadRequest)


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_the_launcher_as_a_command(tmp_path: Path, dashes: list[str]) -> None:
    launcher = Launcher(tmp_path)
    launcher.announce()
    program = "import sys; sys.exit(5 if sys.argv[1:4] == [sys.argv[1], '--host', '127.0.0.1'] else 1)"
    arguments = ["launch", "--engine", "vllm", "--runtime-dir", str(launcher.runtime), *dashes]
    done = subprocess.run(
        [sys.executable, "-m", "modelswap_engine", *arguments, sys.executable, "-c", program, "{model}"],
        check=False, capture_output=True, timeout=60,
    )  # fmt: skip
    launcher.clear()
    assert done.returncode == 5, done.stderr
