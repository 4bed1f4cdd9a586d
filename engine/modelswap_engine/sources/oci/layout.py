"""Which files a manifest names: CNCF ModelPack, KitOps and plain artifacts, whose layers are files as they are. Pure.

Of a layer that is an archive no single tensor can be read: it is left out, and where that leaves no weights, refused.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import InvalidCheckpoint, SourceUnreadable, UnsupportedFormat
from modelswap_engine.sources.remote.port import FileStat

MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NAMES: Final = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_UNPACK: Final = "io.deis.oras.content.unpack"
_PLAIN_IN_SPITE: Final = "application/vnd.oci.image.layer.v1.tar"
"""What oras calls a file that nobody gave a type: no archive, unless it says that it is to be unpacked."""
_ARCHIVE: Final = re.compile(r"[.+](tar|gzip|zstd|tgz)\b")
_WEIGHTS: Final = ".safetensors"


class _Layer(msgspec.Struct, rename="camel"):
    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct, rename="camel"):
    schema_version: int
    layers: list[_Layer] = []
    manifests: list[msgspec.Raw] | None = None


def files_of(manifest: bytes, *, shown_as: str) -> Mapping[str, FileStat]:
    """Return the files at the root of an artifact; the revision of a file is the digest of its blob.

    Args:
        manifest: of the artifact.
        shown_as: where it is, for messages.

    Raises:
        UnsupportedFormat: an index, or an artifact whose weights are in archives.
        InvalidCheckpoint: two layers have one name, or a layer has no digest that is known.
        SourceUnreadable: it is no manifest.
    """
    try:
        read = msgspec.json.decode(manifest, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise SourceUnreadable(f"{shown_as}: not a manifest of an artifact", advice="check the address") from None
    if read.manifests is not None:
        raise UnsupportedFormat(
            f"{shown_as}: an index of several artifacts", advice="name the digest of the one that is meant"
        )
    files: dict[str, FileStat] = {}
    for layer in read.layers:
        name = _name(layer)
        if not name or "/" in name or _archived(layer):
            continue
        stat = _stat(layer, name, shown_as)
        if files.setdefault(name, stat) != stat:
            raise InvalidCheckpoint(f"{shown_as}: two layers are called {shown(name)}", advice="push it again")
    if not any(name.endswith(_WEIGHTS) for name in files) and any(map(_archived, read.layers)):
        raise UnsupportedFormat(
            f"{shown_as}: its layers are archives, of which single tensors cannot be read",
            advice="push the files as they are: `modctl build` (raw is its default), "
            "`kit pack --use-model-pack` with raw layers, or `oras push`",
        )
    return files


def _name(layer: _Layer) -> str:
    annotations = layer.annotations or {}
    return next((annotations[key].removeprefix("./") for key in _NAMES if annotations.get(key)), "")


def _archived(layer: _Layer) -> bool:
    if layer.media_type == _PLAIN_IN_SPITE and _name(layer).endswith((_WEIGHTS, ".json", ".txt", ".jinja", ".model")):
        return (layer.annotations or {}).get(_UNPACK) == "true"
    return _ARCHIVE.search(layer.media_type) is not None


def _stat(layer: _Layer, name: str, shown_as: str) -> FileStat:
    if DIGEST.fullmatch(layer.digest) is None or layer.size < 0:
        raise InvalidCheckpoint(
            f"{shown_as}: {shown(name)} has no sha256 digest and size", advice="push it again with sha256 digests"
        )
    return FileStat(size=layer.size, revision=layer.digest)
