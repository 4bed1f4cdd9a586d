"""``modelswap manifest`` and ``modelswap diff`` as a person or a pipeline uses them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.cli import diff, manifest
from modelswap_engine.protocol.errors import ManifestMismatch, SourceNotFound, SourceUnreadable, UnsupportedFormat
from tests.support.checkpoints import CONFIG, SINGLE, TENSORS, write_checkpoint

app = typer.Typer()
manifest.register(app)
diff.register(app)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m")


def test_build_writes_the_manifest_into_the_folder(folder: Path) -> None:
    result = run("manifest", "build", folder)
    assert result.exit_code == 0
    written = manifests.decode((folder / MANIFEST_FILE).read_bytes())
    assert written == build_manifest(folder)
    assert written.digest in result.stdout
    assert {entry.name for entry in folder.iterdir()} == {"config.json", SINGLE, MANIFEST_FILE}


def test_build_again_replaces_even_a_damaged_manifest_and_follows_no_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    (folder / MANIFEST_FILE).symlink_to("SELF")
    (folder / MANIFEST_FILE).unlink()
    (folder / MANIFEST_FILE).write_text("garbage")
    assert run("manifest", "build", folder).exit_code == 0
    output = tmp_path / "link.json"
    output.symlink_to(tmp_path / "precious")
    assert run("manifest", "build", folder, "--output", output).exit_code == 0
    assert (tmp_path / "precious").read_text() == "keep me"
    assert manifests.decode(output.read_bytes()).complete


def test_build_to_stdout_and_elsewhere(folder: Path, tmp_path: Path) -> None:
    result = run("manifest", "build", folder, "--output", "-")
    assert manifests.decode(result.stdout_bytes) == build_manifest(folder)
    assert not (folder / MANIFEST_FILE).exists()
    assert isinstance(run("manifest", "build", folder, "--output", tmp_path / "no" / "x").exception, SourceUnreadable)


def test_json_is_the_only_thing_on_stdout(folder: Path) -> None:
    built = json.loads(run("manifest", "build", folder, "-o", "json").stdout)
    assert built["digest"] == build_manifest(folder).digest
    assert (built["tensors"], built["bytes"], built["path"]) == (3, 28, str(folder / MANIFEST_FILE))
    assert json.loads(run("manifest", "show", folder, "-o", "json").stdout)["digest"] == built["digest"]
    assert json.loads(run("manifest", "verify", folder, "-o", "json").stdout)["digest"] == built["digest"]


def test_show_without_a_shipped_manifest_computes_one(folder: Path) -> None:
    result = run("manifest", "show", folder)
    assert result.exit_code == 0
    assert all(name in result.stdout for name in (*TENSORS, "config.json", build_manifest(folder).digest))
    assert not (folder / MANIFEST_FILE).exists()


def test_verify_finds_a_flipped_byte_that_show_trusts(folder: Path) -> None:
    run("manifest", "build", folder)
    data = bytearray((folder / SINGLE).read_bytes())
    data[-1] ^= 1
    (folder / SINGLE).write_bytes(data)
    assert run("manifest", "show", folder).exit_code == 0
    result = run("manifest", "verify", folder)
    assert isinstance(result.exception, ManifestMismatch)
    assert "'c.bias'" in result.exception.message


def test_verify_needs_a_manifest(folder: Path) -> None:
    result = run("manifest", "verify", folder)
    assert isinstance(result.exception, SourceNotFound)
    assert "manifest build" in result.exception.advice


def test_links_into_a_cache_need_its_root(tmp_path: Path, folder: Path) -> None:
    (folder / SINGLE).rename(tmp_path / "blob")
    (folder / SINGLE).symlink_to(tmp_path / "blob")
    assert run("manifest", "show", folder).exit_code == 1
    assert run("manifest", "show", folder, "--root", tmp_path).exit_code == 0


def changed(folder: Path) -> Path:
    tensors = {name: TENSORS[name] for name in ("a.weight", "b.weight")}
    tensors |= {"a.weight": ("BF16", (2, 3), bytes(12)), "b.weight": ("F16", (4,), bytes(8)), "new": ("U8", (1,), b"x")}
    return write_checkpoint(folder, tensors, side_files={"config.json": CONFIG | {"eos_token_id": 7}})


def test_diff_of_two_folders(folder: Path, tmp_path: Path) -> None:
    other = changed(tmp_path / "other")
    result = run("diff", folder, other)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["changed", "BF16", "2x3", "12", "B", "a.weight"] in lines
    assert ["added", "U8", "1", "1", "B", "new"] in lines
    assert ["removed", "I64", "scalar", "0", "B", "c.bias"] in lines
    assert ["reshaped", "F32", "2", "->", "F16", "4", "8", "B", "b.weight"] in lines
    assert ["side", "file", "config.json"] in lines
    assert result.stdout.endswith("4 of 4 tensors differ, in 3 groups of 21 B; 21 B of 21 B would travel\n")


def test_diff_shows_long_names_whole(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.29.self_attn.a_name_that_is_longer_than_a_terminal_is_wide.v_proj.weight"
    other = write_checkpoint(tmp_path / "other", TENSORS | {name: ("U8", (1,), b"x")})
    assert name in run("diff", folder, other).stdout


def test_diff_as_json_between_a_folder_and_a_manifest_file(folder: Path, tmp_path: Path) -> None:
    other = changed(tmp_path / "other")
    run("manifest", "build", other, "--output", tmp_path / "other.json")
    found = json.loads(run("diff", folder, tmp_path / "other.json", "-o", "json").stdout)
    assert found["changed"] == ["a.weight"]
    assert (found["added"], found["removed"]) == (["new"], ["c.bias"])
    assert (found["reshaped"], found["retyped"], found["sideFiles"]) == (["b.weight"], ["b.weight"], ["config.json"])
    assert (found["changedBytes"], found["totalBytes"]) == (21, 21)


def test_diff_exit_code_is_asked_for(folder: Path, tmp_path: Path) -> None:
    other = changed(tmp_path / "other")
    assert run("diff", folder, other).exit_code == 0
    assert run("diff", folder, other, "--exit-code").exit_code == 1
    same = run("diff", folder, write_checkpoint(tmp_path / "same", shards=3), "--exit-code")
    assert same.exit_code == 0
    assert "same content" in same.stdout


def test_diff_of_something_else(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert isinstance(run("diff", folder, tmp_path).exception, UnsupportedFormat)
    assert isinstance(run("diff", folder, tmp_path / "no.json").exception, SourceUnreadable)
    assert run("diff", folder).exit_code == 2


def test_errors_are_two_lines_on_stderr_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    command = [
        sys.executable,
        "-c",
        "from modelswap_engine.cli.main import main; main()",
        "manifest",
        "build",
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("error: pytorch_model.bin: pickle")
    assert second.startswith("next: ")
