"""A serving process that takes signed versions only: what it refuses, says, and serves meanwhile."""

import shutil
from pathlib import Path

import pytest

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.layout import SIGNATURE_FILE
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.signing.sign import sign
from tests.support.serve import Served
from tests.support.signers import KeyPair, write_key

pytestmark = pytest.mark.model


def publish(source: Path, folder: Path, key: KeyPair | None) -> Path:
    shutil.copytree(source, folder)
    data = manifests.encode(build_manifest(folder))
    (folder / MANIFEST_FILE).write_bytes(data)
    if key is not None:
        (folder / SIGNATURE_FILE).write_bytes(sign(data, key=key.private))
    return folder


def test_what_is_not_signed_is_refused_while_the_old_version_answers(pair: Path, tmp_path: Path) -> None:
    key = write_key(tmp_path / "keys")
    (tmp_path / "trusted").mkdir()
    shutil.copy(key.public, tmp_path / "trusted")
    old, new = publish(pair / "v1", tmp_path / "v1", key), publish(pair / "v2", tmp_path / "v2", None)
    options = ["--version", "1.0", "--require-signature", "--trusted-keys", str(tmp_path / "trusted")]
    served = Served(tmp_path / "pod", old, options=options, roots=[tmp_path])
    try:
        served.start().wait_ready()
        refused = served.command("swap", "--source", str(new), "--version", "1.1")
        assert (refused.code, "SignatureMissing" in refused.out + refused.err) == (1, True), refused
        assert "SIGN" in served.command("plan", "--source", str(new)).err.upper()
        assert served.state().live.version == "1.0"
        (new / SIGNATURE_FILE).write_bytes(sign((new / MANIFEST_FILE).read_bytes(), key=key.private))
        done = served.command("swap", "--source", str(new), "--version", "1.1")
        assert done.code == 0, done
        state = served.state()
        assert state.live.version == "1.1"
        assert state.operation.plan.signed_by.startswith("key release.pub")
    finally:
        served.stop()
        print(served.tail(lines=60))
