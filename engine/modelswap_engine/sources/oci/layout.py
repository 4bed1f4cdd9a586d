"""Which files a manifest names: CNCF ModelPack, KitOps and plain artifacts. Pure.

Layers are files as they are, or uncompressed tar archives of files, as KitOps packs them. Of a compressed one no single
tensor can be read: it is left out, and where that leaves no weights, refused.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.protocol.errors import InvalidCheckpoint, SourceUnreadable, UnsupportedFormat
from modelswap_engine.sources.oci.tar import Member
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
_PLAIN: Final = ".tar"
_BESIDE: Final = re.compile(r"\.(dataset|code|docs?|prompt)\.")
"""What lies beside a model and is not looked into."""
_WEIGHTS: Final = ".safetensors"
_CONFIGS: Final = frozenset({"config.json", "adapter_config.json"})


class _Layer(msgspec.Struct, rename="camel"):
    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct, rename="camel"):
    schema_version: int
    layers: list[_Layer] = []
    manifests: list[msgspec.Raw] | None = None


class Archive(NamedTuple):
    """An uncompressed archive among the layers."""

    name: str
    digest: str
    size: int


class Layout(NamedTuple):
    """What a manifest names.

    Attributes:
        files: those at the root that are layers of their own; the revision of each is the digest of its blob.
        archives: whose members are not known yet.
        compressed: how archives are called that cannot be read by ranges.
    """

    files: Mapping[str, FileStat]
    archives: tuple[Archive, ...] = ()
    compressed: tuple[str, ...] = ()


def layout_of(manifest: bytes, *, shown_as: str) -> Layout:
    """Return what an artifact consists of.

    Args:
        manifest: of the artifact.
        shown_as: where it is, for messages.

    Raises:
        UnsupportedFormat: an index, or an artifact whose weights are in compressed archives alone.
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
        _put(files, name, _stat(layer, name, shown_as), shown_as)
    if _whole(files):
        return Layout(files)
    packed = [layer for layer in read.layers if _archived(layer) and not _BESIDE.search(layer.media_type)]
    plain = [layer for layer in packed if layer.media_type.endswith(_PLAIN)]
    compressed = tuple(
        f"{_name(layer) or layer.digest[:19]} ({layer.media_type})" for layer in packed if layer not in plain
    )
    archives = tuple(
        Archive(name := _name(layer) or layer.digest[:19], *_digest(layer, name, shown_as)) for layer in plain
    )
    if not archives:
        _refuse_compressed(files, compressed, shown_as)
    return Layout(files, archives, compressed)


def placed(layout: Layout, found: Iterable[tuple[Archive, Member]], *, shown_as: str) -> Mapping[str, FileStat]:
    """Return the files of an artifact some of whose files are members of archives.

    A member's revision says where it is (:func:`part_of`). Of members in folders those count that lie where the weights
    do: packing tools keep the path that a folder had on the machine where it was packed.

    Raises:
        UnsupportedFormat: the weights are in several folders, or in compressed archives.
        InvalidCheckpoint: two files have one name.
    """
    files = dict(layout.files)
    members = [(*member.path.rpartition("/")[::2], archive, member) for archive, member in found]
    folders = sorted({folder for folder, name, _, _ in members if name.endswith(_WEIGHTS)})
    if len(folders) > 1:
        raise UnsupportedFormat(
            f"{shown_as}: weights in several folders: {shown(', '.join(folders), 200)}",
            advice="push one model as an artifact of its own",
        )
    for folder, name, archive, member in members:
        if folder == (folders[0] if folders else ""):
            stat = FileStat(size=member.size, revision=f"{archive.digest}+{member.offset}/{archive.size}")
            _put(files, name, stat, shown_as)
    _refuse_compressed(files, layout.compressed, shown_as)
    return files


def part_of(stat: FileStat) -> tuple[str, int, int]:
    """Return the digest and the size of the blob that holds a file, and where in it the file begins."""
    digest, _, rest = stat.revision.partition("+")
    offset, _, size = rest.partition("/")
    return (digest, int(size), int(offset)) if rest else (digest, stat.size, 0)


def _whole(files: Mapping[str, FileStat]) -> bool:
    return any(name.endswith(_WEIGHTS) for name in files) and not _CONFIGS.isdisjoint(files)


def _refuse_compressed(files: Mapping[str, FileStat], compressed: Sequence[str], shown_as: str) -> None:
    if compressed and not any(name.endswith(_WEIGHTS) for name in files):
        raise UnsupportedFormat(
            f"{shown_as}: its weights are in compressed archives, of which single tensors cannot be read: "
            f"{shown(', '.join(compressed), 200)}",
            advice="pack them without compression (`kit pack --compression none`), or push the files as they are "
            "(`modctl build`, `oras push`)",
        )


def _put(files: dict[str, FileStat], name: str, stat: FileStat, shown_as: str) -> None:
    if files.setdefault(name, stat) != stat:
        raise InvalidCheckpoint(f"{shown_as}: two layers are called {shown(name)}", advice="push it again")


def _name(layer: _Layer) -> str:
    annotations = layer.annotations or {}
    return next((annotations[key].removeprefix("./") for key in _NAMES if annotations.get(key)), "")


def _archived(layer: _Layer) -> bool:
    if layer.media_type == _PLAIN_IN_SPITE and _name(layer).endswith((_WEIGHTS, ".json", ".txt", ".jinja", ".model")):
        return (layer.annotations or {}).get(_UNPACK) == "true"
    return _ARCHIVE.search(layer.media_type) is not None


def _stat(layer: _Layer, name: str, shown_as: str) -> FileStat:
    digest, size = _digest(layer, name, shown_as)
    return FileStat(size=size, revision=digest)


def _digest(layer: _Layer, name: str, shown_as: str) -> tuple[str, int]:
    if DIGEST.fullmatch(layer.digest) is None or layer.size < 0:
        raise InvalidCheckpoint(
            f"{shown_as}: {shown(name)} has no sha256 digest and size", advice="push it again with sha256 digests"
        )
    return layer.digest, layer.size
