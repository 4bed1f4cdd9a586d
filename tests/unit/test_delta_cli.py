"""``modelswap delta`` as a person or a pipeline uses it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.cli import delta
from modelswap_engine.protocol.errors import BadRequest, Busy, DigestMismatch, InvalidDelta, UnsupportedFormat
from tests.support.checkpoints import TENSORS, write_checkpoint

app = typer.Typer()
delta.register(app)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["delta", *(str(word) for word in words)])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    changed = TENSORS | {"a.weight": ("BF16", (2, 3), bytes(range(10)) + b"!!"), "new": ("U8", (1,), b"x")}
    del changed["c.bias"]
    return write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b", changed, side_files={"vocab.txt": b"v"})


@pytest.fixture
def pack(tmp_path: Path, folders: tuple[Path, Path]) -> Path:
    assert run("build", *folders, "-o", tmp_path / "p.delta").exit_code == 0
    return tmp_path / "p.delta"


def test_build_and_apply_there_and_nothing_else(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    old, new = folders
    built = run("build", old, new, "-o", tmp_path / "p.delta")
    assert built.exit_code == 0
    digest = build_manifest(new).digest
    assert digest in built.stdout
    applied = run("apply", tmp_path / "p.delta", "--base", old, "-o", tmp_path / "c", "--digest", digest)
    assert applied.exit_code == 0
    assert build_manifest(tmp_path / "c").digest == digest
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "b", "c", "p.delta"}


def test_a_pack_in_a_folder_has_the_name_that_pods_look_for(folders: tuple[Path, Path]) -> None:
    old, new = folders
    digest = build_manifest(new).digest
    built = json.loads(run("build", old, new, "-o", new, "--format", "json").stdout)
    assert built["path"] == str(new / f"modelswap-from-{build_manifest(old).digest[7:19]}.delta")
    assert run("show", built["path"]).exit_code == 0
    assert build_manifest(new).digest == digest
    assert isinstance(run("build", old, new, "-o", new).exception, Busy)


def test_json_is_the_only_thing_on_stdout(tmp_path: Path, folders: tuple[Path, Path], pack: Path) -> None:
    old, new = folders
    built = json.loads(run("build", old, new, "-o", tmp_path / "q", "--format", "json").stdout)
    assert built == {
        "path": str(tmp_path / "q"),
        "fromDigest": build_manifest(old).digest,
        "toDigest": build_manifest(new).digest,
        "tensors": 2,
        "removed": 1,
        "sideFiles": ["vocab.txt"],
        "denseBytes": 14,
        "packBytes": pack.stat().st_size,
        "totalBytes": 22,
    }
    applied = json.loads(run("apply", pack, "--base", old, "-o", tmp_path / "c", "--format", "json").stdout)
    assert applied == built | {"path": str(tmp_path / "c")}
    shown = json.loads(run("show", pack, "-o", "json").stdout)
    assert shown["report"] == built | {"path": str(pack)}
    assert [entry["name"] for entry in shown["header"]["tensors"]] == ["a.weight", "new"]
    assert shown["header"]["removed"] == ["c.bias"]


def test_show_says_each_tensor_and_its_share(pack: Path) -> None:
    lines = [line.split() for line in run("show", pack).stdout.splitlines()]
    assert ["sparse", "16.67", "%", "12", "B", "17", "B", "a.weight"] in lines or [
        "raw", "16.67", "%", "12", "B", "17", "B", "a.weight",
    ] in lines  # fmt: skip
    assert ["raw", "new", "1", "B", "6", "B", "new"] in lines
    assert ["removed", "c.bias"] in lines
    assert ["side", "file", "1", "B", "1", "B", "vocab.txt"] in lines


def test_what_is_refused(tmp_path: Path, folders: tuple[Path, Path], pack: Path) -> None:
    old, new = folders
    assert isinstance(run("build", old, new, "-o", pack).exception, Busy)
    assert isinstance(run("build", tmp_path / "not read first", new, "-o", pack).exception, Busy)
    assert isinstance(run("apply", pack, "--base", new, "-o", tmp_path / "c").exception, DigestMismatch)
    wanted = run("apply", pack, "--base", old, "-o", tmp_path / "c", "--digest", "sha256:" + "0" * 64)
    assert isinstance(wanted.exception, DigestMismatch)
    assert isinstance(run("apply", pack, "--base", old, "-o", new).exception, Busy)
    assert isinstance(run("show", old / "config.json").exception, InvalidDelta)
    (tmp_path / "empty").mkdir()
    assert isinstance(run("build", old, tmp_path / "empty", "-o", tmp_path / "q").exception, UnsupportedFormat)
    assert run("build", old, new).exit_code == 2
    assert not (tmp_path / "c").exists()


def test_links_into_a_cache_need_their_root(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    old, new = folders
    (old / "model.safetensors").rename(tmp_path / "blob")
    (old / "model.safetensors").symlink_to(tmp_path / "blob")
    assert run("build", old, new, "-o", tmp_path / "p").exit_code == 1
    assert run("build", old, new, "-o", tmp_path / "p", "--root", tmp_path).exit_code == 0


def test_a_missing_package_is_named(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("modelswap_engine.delta")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    error = run("show", pack).exception
    assert isinstance(error, BadRequest)
    assert "zstandard" in error.message
    assert "modelswap[sources]" in error.advice


def test_errors_are_two_lines_and_nothing_heavy_is_imported(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    program = (
        "import sys; from modelswap_engine.cli.main import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'aiohttp') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, "delta", "show", str(folders[0] / "config.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stdout == "[]\n"
    first, second = done.stderr.splitlines()
    assert first.startswith("error: config.json: not a delta pack")
    assert second.startswith("next: ")
