"""Signed manifests and their provenance as a person or a pipeline makes and checks them."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner, Result

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.layout import SIGNATURE_FILE
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.cli import main, manifest
from modelswap_engine.lora.config import parse_config
from modelswap_engine.lora.digest import adapter_digest
from modelswap_engine.protocol.errors import (
    BadRequest,
    InvalidCheckpoint,
    ManifestMismatch,
    SignatureInvalid,
    SignatureMissing,
    SourceNotFound,
    TrustedKeysUnusable,
)
from modelswap_engine.sources.adapter import open_adapter
from modelswap_engine.sources.threads import MountThreads
from tests.support.adapters import write_adapter
from tests.support.checkpoints import SINGLE, write_checkpoint
from tests.support.signers import Authority, KeyPair, write_key

app = typer.Typer()
manifest.register(app)


@app.command()
def other() -> None:
    """A second command, so that ``manifest`` is one by name."""


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["manifest", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m")


@pytest.fixture
def key(tmp_path: Path) -> KeyPair:
    return write_key(tmp_path / "keys")


def test_a_signed_manifest_is_verified_by_the_public_key(folder: Path, key: KeyPair) -> None:
    assert run("build", folder, "--sign", key.private).exit_code == 0
    result = run("verify", folder, "--key", key.public)
    assert result.exit_code == 0
    assert "signed by     key release.pub (sha256:" in result.stdout
    assert run("verify", folder).exit_code == 0, "without --key nobody is asked for"


def test_upstreams_own_tool_verifies_it(folder: Path, key: KeyPair) -> None:
    run("build", folder, "--sign", key.private)
    tool = [sys.executable, "-m", "model_signing", "verify", "key", str(folder / MANIFEST_FILE)]
    options = ["--signature", str(folder / SIGNATURE_FILE), "--public_key", str(key.public)]
    done = subprocess.run([*tool, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (folder / MANIFEST_FILE).write_bytes((folder / MANIFEST_FILE).read_bytes() + b" ")
    done = subprocess.run([*tool, *options], capture_output=True, text=True, check=False)
    assert done.returncode != 0


def test_what_upstreams_own_tool_signs_is_verified(folder: Path, key: KeyPair) -> None:
    run("build", folder)
    tool = [sys.executable, "-m", "model_signing", "sign", "key", str(folder / MANIFEST_FILE)]
    options = ["--signature", str(folder / SIGNATURE_FILE), "--private_key", str(key.private)]
    subprocess.run([*tool, *options], capture_output=True, check=True)
    assert run("verify", folder, "--key", key.public).exit_code == 0


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_other_curves_and_folders_of_keys(folder: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    pair = write_key(tmp_path / "others", curve=curve)
    trusted = tmp_path / "trusted"
    (trusted / "..data").mkdir(parents=True)
    (trusted / "..data" / "release.pub").write_bytes(pair.public.read_bytes())
    (trusted / "release.pub").symlink_to("..data/release.pub")  # as Kubernetes mounts a Secret
    write_key(tmp_path / "old", "old").public.rename(trusted / "old.pub")
    assert run("build", folder, "--sign", pair.private).exit_code == 0
    assert "key release.pub" in run("verify", folder, "--key", trusted).stdout


def test_certificates(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    private, certificate = authority.issue("trainer")
    assert run("build", folder, "--sign", private, "--certificate", certificate).exit_code == 0
    assert "certificate CN=trainer" in run("verify", folder, "--key", authority.certificate).stdout


def test_signing_what_was_built_reads_no_tensor(folder: Path, key: KeyPair) -> None:
    assert isinstance(run("sign", folder, "--key", key.private).exception, SourceNotFound)
    run("build", folder)
    written = (folder / MANIFEST_FILE).read_bytes()
    data = bytearray((folder / SINGLE).read_bytes())
    data[-1] ^= 1
    (folder / SINGLE).write_bytes(data)
    assert run("sign", folder, "--key", key.private).exit_code == 0
    assert (folder / MANIFEST_FILE).read_bytes() == written
    assert isinstance(run("verify", folder, "--key", key.public).exception, ManifestMismatch)


def test_an_unsigned_one_and_one_that_was_built_again(folder: Path, key: KeyPair) -> None:
    run("build", folder)
    assert isinstance(run("verify", folder, "--key", key.public).exception, SignatureMissing)
    run("sign", folder, "--key", key.private)
    again = run("build", folder, "--provenance", "job=41")
    assert "sign anew" in again.stderr
    assert isinstance(run("verify", folder, "--key", key.public).exception, SignatureInvalid)


def test_provenance_is_signed_and_no_part_of_the_digest(folder: Path, key: KeyPair) -> None:
    digest = build_manifest(folder).digest
    words = ["who=ci@example.org", "when=2026-11-30T13:00:00Z", "base=sha256:00", "job=train-41=b"]
    options = [part for word in words for part in ("--provenance", word)]
    assert run("build", folder, "--sign", key.private, *options).exit_code == 0
    shown = json.loads(run("verify", folder, "--key", key.public, "-o", "json").stdout)
    assert shown["digest"] == digest
    assert shown["provenance"]["job"] == "train-41=b"
    assert shown["signedBy"].startswith("key release.pub")
    assert manifests.decode((folder / MANIFEST_FILE).read_bytes()).digest == digest
    changed = (folder / MANIFEST_FILE).read_bytes().replace(b"train-41", b"train-42")
    (folder / MANIFEST_FILE).write_bytes(changed)
    assert isinstance(run("verify", folder, "--key", key.public).exception, SignatureInvalid)


def test_a_manifest_without_provenance_has_the_bytes_it_always_had(folder: Path) -> None:
    assert b"provenance" not in manifests.encode(build_manifest(folder))


@pytest.mark.parametrize("words", [["who"], ["what=x"], ["who=a", "who=b"]])
def test_words_of_provenance_that_are_none(folder: Path, words: list[str]) -> None:
    options = [part for word in words for part in ("--provenance", word)]
    assert isinstance(run("build", folder, *options).exception, BadRequest)
    assert not (folder / MANIFEST_FILE).exists()


def test_provenance_that_a_terminal_would_act_on(folder: Path) -> None:
    assert isinstance(run("build", folder, "--provenance", "who=\x1b[31m").exception, InvalidCheckpoint)
    assert isinstance(run("build", folder, "--provenance", "who=" + "a" * 257).exception, InvalidCheckpoint)


def test_keys_that_cannot_be_used(folder: Path, key: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(run("build", folder, "--sign", key.public).exception, BadRequest)
    assert isinstance(run("build", folder, "--sign", tmp_path / "none.pem").exception, BadRequest)
    assert isinstance(run("build", folder, "--sign", key.private, "--output", "-").exception, BadRequest)
    assert isinstance(run("build", folder, "--certificate", key.public).exception, BadRequest)
    _, foreign = Authority(tmp_path / "pki").issue("trainer")
    assert isinstance(run("build", folder, "--sign", key.private, "--certificate", foreign).exception, BadRequest)
    assert not (folder / MANIFEST_FILE).exists()
    assert run("build", folder, "--sign", key.private).exit_code == 0
    result = run("verify", folder, "--key", key.private)
    assert isinstance(result.exception, TrustedKeysUnusable)
    assert "PRIVATE KEY" in result.exception.message
    assert isinstance(run("verify", folder, "--key", tmp_path / "none").exception, TrustedKeysUnusable)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    result = run("verify", folder, "--key", key.public)
    assert isinstance(result.exception, TrustedKeysUnusable)
    assert "modelswap[signing]" in result.exception.advice
    assert isinstance(run("sign", folder, "--key", key.private).exception, BadRequest)


@pytest.mark.parametrize("command", ["serve", "proxy"])
def test_an_engine_that_takes_signed_versions_only_must_know_by_whom(command: str) -> None:
    words = [command, "--model", "/m", "--insecure", "--require-signature"]
    words += ["--backend", "vllm", "--upstream", "http://127.0.0.1:1"] if command == "proxy" else []
    result = CliRunner().invoke(main.app, words)
    assert isinstance(result.exception, BadRequest)
    assert "--trusted-keys" in result.exception.message


def test_an_adapter_s_folder_is_signed_and_verified_and_says_what_objects_pin(tmp_path: Path, key: KeyPair) -> None:
    folder = write_adapter(tmp_path / "adapter")
    assert run("build", folder, "--sign", key.private).exit_code == 0
    result = run("verify", folder, "--key", key.public, "-o", "json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    opened = open_adapter(folder, roots=[folder], threads=MountThreads("test"))
    pin = adapter_digest(parse_config(opened.config), opened.tensors, asyncio.run(opened.hash()))
    assert (said["digest"], said["sideFiles"]) == (pin, ["adapter_config.json"])
    assert said["signedBy"].startswith("key release.pub")
    assert json.loads(run("show", folder, "-o", "json").stdout)["tensors"][0]["file"] == "adapter_model.safetensors"
