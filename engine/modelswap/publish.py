"""For training code: publish weights, point a ModelVersion at them, wait until they are served.

    done = publish(model.state_dict(), "s3://acme-models/chat", version="step-200", base=last.uri)
    bumped = bump(model_version="chat", namespace="llm", version="step-200", uri=done.uri, digest=done.digest)
    wait_until_served(bumped, timeout=300)

``publish`` needs the extra ``sources`` and neither torch nor a cluster; the other two need the package ``kubernetes``.
Every error is a :class:`modelswap_engine.protocol.errors.ModelswapError`: ``code``, ``message``, ``advice``.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from modelswap.rollout import Bumped, BumpFailed, NotServed, Served, bump, wait_until_served
from modelswap_engine.checkpoint.canonical import SIDE_FILES
from modelswap_engine.checkpoint.layout import Read
from modelswap_engine.checkpoint.manifest import Provenance, check_provenance
from modelswap_engine.protocol.errors import BadRequest, SourceUnreadable
from modelswap_engine.publishing.anywhere import Anywhere
from modelswap_engine.publishing.folder import read_folder
from modelswap_engine.publishing.packing import PackOptions
from modelswap_engine.publishing.plan import SHARD_BYTES
from modelswap_engine.publishing.port import Version
from modelswap_engine.publishing.publisher import Published
from modelswap_engine.publishing.tensors import TensorsVersion

__all__ = ["BumpFailed", "Bumped", "NotServed", "Published", "Served", "bump", "publish", "wait_until_served"]

T = TypeVar("T")


def publish(
    source: Mapping[str, Any] | str | Path,
    uri: str,
    *,
    base: str = "",
    base_folder: str | Path | None = None,
    delta: bool | None = None,
    version: str = "",
    side_files: Mapping[str, bytes] | str | Path | None = None,
    provenance: Mapping[str, str] | None = None,
    sign: Callable[[bytes], bytes] | None = None,
    credentials: str = "",
    credentials_dir: Path | None = None,
    allow: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Published:
    """Publish a version; it becomes visible at once or not at all. Blocks; call it on one rank.

    Args:
        source: a checkpoint folder, or name → tensor (torch or numpy) with the names that a checkpoint has. Tensors are
            copied out in small pieces; nobody may change them until this returns.
        uri: a new folder (``s3://``, ``gs://``, ``az://``, ``file://``), or with ``version`` the one above it.
        base: URI of a published version: only tensors that it does not have travel. Both lie in
            mounted folders, where pods mount them at the same paths, or neither.
        base_folder: a local copy of the base, which is read for the pack; the base itself otherwise.
        delta: whether what differs from the base is packed beside the version, for pods that hold the base: None
            where that is at most half of it, and where it can be made; True in any case, or it fails; False never.
            ``Published.pack`` says what became of it.
        version: name of the folder below ``uri``.
        side_files: config, tokenizer and so on, by name or all of them in a folder. They count beside those of a
            checkpoint folder and before them; with tensors, beside and before those of the base.
        provenance: where it comes from: ``who``, ``when``, ``base``, ``job``.
        sign: returns the signature of a manifest, such as :func:`modelswap_engine.signing.sign.sign` with its key.
        credentials: name of credentials in ``credentials_dir``; without, the environment's or the machine's own.
        credentials_dir: a folder of mounted credentials.
        allow: prefixes that the base's manifest may name beside the buckets of both URIs.
        shard_bytes: how large files with tensors may be.
        progress: told (bytes handed on, bytes to send), from another thread where an event loop runs in this one.

    Raises:
        AlreadyPublished: another version is there.
        BadRequest, InvalidCheckpoint, UnsupportedFormat, UnsupportedScheme, SourceNotAllowed: refused.
        SourceNotFound, ManifestMismatch: of the base.
        SourceDenied, SourceUnreadable, SourceChanged, PublishFailed: not now; it may be repeated.
    """
    make = partial(
        _version, source, given=_side_files(side_files), provenance=_provenance(provenance), shard=shard_bytes
    )
    places = Anywhere(credentials=credentials, credentials_dir=credentials_dir, allow=allow)
    folder = f"{uri.rstrip('/')}/{version}" if version else uri
    copy = Path(base_folder) if base_folder is not None else None
    pack = PackOptions(folder=copy, required=bool(delta)) if base and delta is not False else None
    return _finish(places.publish(make, folder, base=base, pack=pack, sign=sign, progress=progress))


def _version(
    source: Mapping[str, Any] | str | Path,
    base: Read | None,
    *,
    given: Mapping[str, bytes],
    provenance: Provenance | msgspec.UnsetType,
    shard: int,
) -> Version:
    if isinstance(source, str | Path):
        return read_folder(Path(source), side_files=given, provenance=provenance)
    side_files = {**(base.side_files if base is not None else {}), **given}
    if "config.json" not in side_files:
        raise BadRequest(
            "there is no config.json: nobody could serve these tensors",
            advice="pass side_files=FOLDER of the checkpoint that was trained on, or a base",
        )
    names = frozenset(base.tensors) if base is not None else frozenset()
    return TensorsVersion(source, side_files=side_files, prefer=names, provenance=provenance, shard_bytes=shard)


def _side_files(given: Mapping[str, bytes] | str | Path | None) -> Mapping[str, bytes]:
    if given is None or isinstance(given, Mapping):
        return given or {}
    try:
        return {file.name: file.read_bytes() for file in Path(given).iterdir() if file.name in SIDE_FILES}
    except OSError as error:
        raise SourceUnreadable(f"{given}: {error.strerror or error}", advice="check the folder of side files") from None


def _provenance(given: Mapping[str, str] | None) -> Provenance | msgspec.UnsetType:
    if not given:
        return msgspec.UNSET
    if unknown := given.keys() - set(Provenance.__struct_fields__):
        raise BadRequest(
            f"provenance has no {sorted(unknown)[0]!r}", advice=f"words are: {', '.join(Provenance.__struct_fields__)}"
        )
    found = Provenance(**given)
    check_provenance(found, file="provenance")
    return found


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in notebooks too, where a loop runs in this thread already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing") as pool:
        return pool.submit(asyncio.run, work).result()
