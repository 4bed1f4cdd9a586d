"""Shipped manifests that lie while their own digest is consistent."""

from typing import Any

import msgspec
import pytest

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, SideFile, TensorEntry
from modelswap_engine.protocol.errors import InvalidCheckpoint, ManifestMismatch

HASH = "0" * 64


def tensor(**lies: Any) -> TensorEntry:
    honest = TensorEntry(name="t", dtype="U8", shape=(4,), nbytes=4, file="model.safetensors", offset=100, sha256=HASH)
    return msgspec.structs.replace(honest, **lies)


def side(**lies: Any) -> SideFile:
    honest = SideFile(name="config.json", size=2, sha256=HASH, canonical_sha256=HASH)
    return msgspec.structs.replace(honest, **lies)


LIES: dict[str, tuple[Manifest, str]] = {
    "duplicate tensor": (Manifest(tensors=(tensor(), tensor(offset=104))), "not sorted and unique"),
    "unsorted tensors": (Manifest(tensors=(tensor(name="b"), tensor(name="a"))), "not sorted and unique"),
    "duplicate side file": (Manifest(tensors=(), side_files=(side(), side())), "not sorted and unique"),
    "empty name": (Manifest(tensors=(tensor(name=""),)), "empty name"),
    "control characters": (Manifest(tensors=(tensor(name="a\x1b[2J"),)), "control or invisible"),
    "unknown dtype": (Manifest(tensors=(tensor(dtype="F12"),)), "unknown dtype"),
    "absurd shape": (Manifest(tensors=(tensor(shape=(2**60,)),)), "dimension outside"),
    "negative shape": (Manifest(tensors=(tensor(shape=(-2, -2)),)), "dimension outside"),
    "bytes and shape disagree": (Manifest(tensors=(tensor(nbytes=5),)), "5 bytes stated, 4"),
    "negative offset": (Manifest(tensors=(tensor(offset=-1),)), "offset is negative"),
    "tensor outside the folder": (Manifest(tensors=(tensor(file="../x.safetensors"),)), "not a plain file name"),
    "absolute file": (Manifest(tensors=(tensor(file="/etc/passwd"),)), "not a plain file name"),
    "hash in capitals": (Manifest(tensors=(tensor(sha256="A" * 64),)), "64 hex digits"),
    "short hash": (Manifest(tensors=(tensor(sha256="0"),)), "64 hex digits"),
    "hash with a newline": (Manifest(tensors=(tensor(sha256=HASH + "\n"),)), "64 hex digits"),
    "side file outside the folder": (Manifest(tensors=(), side_files=(side(name="../../x"),)), "not a plain file name"),
    "side file of negative size": (Manifest(tensors=(), side_files=(side(size=-1),)), "bad size or hash"),
    "side file without a hash": (Manifest(tensors=(), side_files=(side(canonical_sha256=""),)), "bad size or hash"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_consistent_lie_is_refused(lie: str) -> None:
    manifest, cause = LIES[lie]
    with pytest.raises(InvalidCheckpoint) as caught:
        manifests.decode(manifests.encode(manifest))
    assert cause in caught.value.message
    assert caught.value.message.startswith(MANIFEST_FILE)
    assert caught.value.message.isprintable()


def test_the_honest_one_is_read() -> None:
    honest = Manifest(tensors=(tensor(),), side_files=(side(),), architecture="A")
    assert manifests.decode(manifests.encode(honest)) == honest


def test_a_tensor_without_a_hash_is_refused() -> None:
    data = manifests.encode(Manifest(tensors=(tensor(),))).replace(HASH.encode(), b"")
    with pytest.raises(InvalidCheckpoint, match="64 hex digits"):
        manifests.decode(data)


def test_a_stated_digest_that_is_not_that_of_the_list() -> None:
    data = manifests.encode(Manifest(tensors=(tensor(),)))
    with pytest.raises(ManifestMismatch) as caught:
        manifests.decode(data.replace(HASH.encode(), ("1" * 64).encode()))
    assert caught.value.details["actual"].startswith("sha256:")
