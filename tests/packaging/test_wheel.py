"""The built wheel works in an empty environment, without torch and without a web framework."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its base requirements, in the locked versions."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = Path(sys.executable).with_name("uv")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("modelswap-*.whl")
    run(uv, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    constraints = folder / "constraints.txt"
    locked = (ROOT / "requirements/dev.txt").read_text().splitlines()
    constraints.write_text("".join(line.split(" \\")[0] + "\n" for line in locked if "==" in line))
    run(uv, "pip", "install", "--quiet", "--python", folder / "venv/bin/python", "-c", constraints, wheel, cwd=folder)
    shutil.rmtree(folder / "dist")
    return folder / "venv/bin"


def test_help_and_manifest_build_need_no_torch(empty_environment: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, {"a.weight": ("F32", (2, 3), bytes(24))})
    assert "manifest" in run(empty_environment / "modelswap", "--help", cwd=tmp_path)
    run(empty_environment / "modelswap", "manifest", "build", checkpoint, cwd=tmp_path)
    assert (checkpoint / "modelswap.manifest.json").is_file()
    run(empty_environment / "python", "-c", "import modelswap", cwd=tmp_path)  # what trainers use comes along
    found = "import importlib.util as u; print([n for n in ('torch', 'aiohttp', 'kopf') if u.find_spec(n)])"
    assert run(empty_environment / "python", "-c", found, cwd=tmp_path).strip() == "[]"


_IMPORTED = """
import sys, importlib.metadata as metadata
sys.modules["opentelemetry"] = None  # may be absent, as in the image
before = set(sys.modules)
import modelswap_engine.cli.proxy
owners = metadata.packages_distributions()
print(*{owner for name in {m.partition(".")[0] for m in set(sys.modules) - before} for owner in owners.get(name, [])})
"""


def test_the_sidecar_imports_nothing_that_its_image_lacks(tmp_path: Path) -> None:
    locked = {
        line.partition("==")[0]
        for line in (ROOT / "requirements/sidecar.txt").read_text().splitlines()
        if "==" in line and not line.startswith((" ", "#"))
    }
    command = [sys.executable, "-c", _IMPORTED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    imported = {re.sub(r"[-_.]+", "-", name).lower() for name in done.stdout.split()}
    assert {"aiohttp", "msgspec"} <= imported
    assert imported - locked - {"modelswap"} == set()
    assert not {"torch", "transformers", "tokenizers", "safetensors"} & locked
