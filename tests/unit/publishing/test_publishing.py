"""Publishing to an object store: what travels, when it is seen, and what is refused. The store is in memory."""

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.layout import SIGNATURE_FILE, Evidence
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, Provenance, TensorEntry
from modelswap_engine.protocol.errors import (
    AlreadyPublished,
    ManifestMismatch,
    ModelswapError,
    PublishFailed,
    SourceChanged,
    SourceNotAllowed,
    SourceNotFound,
)
from modelswap_engine.publishing.base import allowed_beside
from modelswap_engine.publishing.folder import read_folder
from modelswap_engine.signing.sign import sign
from modelswap_engine.signing.trust import read_trusted
from modelswap_engine.signing.verify import verify
from tests.support.checkpoints import CONFIG, INDEX, SINGLE, TENSORS, Tensor, write_checkpoint
from tests.support.published import Stores
from tests.support.signers import write_key

ONE, TWO, THREE = (f"s3://bucket/chat/1.{number}" for number in range(3))
CHANGED = "changed-00001-of-00001.safetensors"


def contents(tensors: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in tensors.items()} | {"config.json": json.dumps(config).encode()}


def trained(tensors: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Tensors of which some have other bytes."""
    flipped = {
        name: (dtype, shape, bytes(255 - byte for byte in data)) for name, (dtype, shape, data) in tensors.items()
    }
    return {name: flipped[name] if name in names else tensor for name, tensor in tensors.items()}


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path / "pods")


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_folder_is_published_as_it_is(stores: Stores, tmp_path: Path, shards: int) -> None:
    folder = write_checkpoint(tmp_path / "a", shards=shards)
    (folder / "README.md").write_text("not of the version")
    done = await stores.publish(folder, ONE)
    assert done.digest == build_manifest(folder).digest
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "README.md"}
    assert stores.names(ONE) == files.keys() | {MANIFEST_FILE}
    for name, data in files.items():
        assert bytes(obstore.get(stores.store(ONE), name).bytes()) == data
    assert (done.bytes_sent, done.files_sent) == (sum(map(len, files.values())), len(files))
    assert await stores.fetched(ONE) == (done.digest, contents(TENSORS))
    entrance = INDEX if shards > 1 else SINGLE
    assert [name for _, name in stores.put][-2:] == [entrance, MANIFEST_FILE]


async def test_only_what_is_new_travels(stores: Stores, tmp_path: Path) -> None:
    await stores.publish(write_checkpoint(tmp_path / "a"), ONE)
    new = trained(TENSORS, "b.weight") | {"d.weight": ("U8", (5,), b"hello")}
    whole = write_checkpoint(tmp_path / "b", new, shards=2)
    done = await stores.publish(whole, TWO, base=ONE)
    assert stores.names(TWO) == {"config.json", CHANGED, MANIFEST_FILE}
    assert done.changed_tensors == 2
    assert done.digest == build_manifest(whole).digest
    assert await stores.fetched(TWO) == (done.digest, contents(new))


async def test_a_base_of_a_base_is_named_itself(stores: Stores, tmp_path: Path) -> None:
    await stores.publish(write_checkpoint(tmp_path / "a"), ONE)
    second = trained(TENSORS, "b.weight")
    await stores.publish(write_checkpoint(tmp_path / "b", second), TWO, base=ONE + "/")
    third = trained(second, "a.weight")
    done = await stores.publish(write_checkpoint(tmp_path / "c", third), THREE, base=TWO)
    shown = await manifest_at(stores, THREE)
    places = {entry.name: (entry.place, entry.file) for entry in shown.tensors}
    assert places == {"a.weight": ("", CHANGED), "b.weight": (TWO, CHANGED), "c.bias": (ONE, SINGLE)}
    assert await stores.fetched(THREE) == (done.digest, contents(third))


async def test_tensors_of_the_same_bytes_are_told_apart(stores: Stores, tmp_path: Path) -> None:
    old: dict[str, Tensor] = {f"layers.{number}.bias": ("F32", (2,), bytes(8)) for number in range(4)}
    await stores.publish(write_checkpoint(tmp_path / "a", old), ONE)
    new = old | {"layers.4.bias": ("F32", (2,), bytes(8)), "layers.1.bias": ("F32", (2,), b"\1" * 8)}
    await stores.publish(write_checkpoint(tmp_path / "b", new), TWO, base=ONE)
    assert (await stores.fetched(TWO))[1] == contents(new)


async def test_other_side_files_alone_are_a_version(stores: Stores, tmp_path: Path) -> None:
    await stores.publish(write_checkpoint(tmp_path / "a"), ONE)
    config = CONFIG | {"eos_token_id": 7}
    done = await stores.publish(write_checkpoint(tmp_path / "b", side_files={"config.json": config}), TWO, base=ONE)
    assert stores.names(TWO) == {"config.json", MANIFEST_FILE}
    assert await stores.fetched(TWO) == (done.digest, contents(TENSORS, config))


async def test_a_version_is_published_once(stores: Stores, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    first = await stores.publish(folder, ONE)
    stores.put.clear()
    again = await stores.publish(folder, ONE)
    assert (again.already_there, again.bytes_sent, again.digest) == (True, 0, first.digest)
    other = write_checkpoint(tmp_path / "b", trained(TENSORS, "a.weight"))
    with pytest.raises(AlreadyPublished, match="is there, and this one is") as caught:
        await stores.publish(other, ONE)
    assert caught.value.details["actual"] == first.digest
    assert stores.put == []


@pytest.mark.parametrize("broken", ["model-00002-of-00003.safetensors", INDEX, MANIFEST_FILE, "config.json"])
async def test_what_broke_off_is_seen_by_nobody_and_goes_on(stores: Stores, tmp_path: Path, broken: str) -> None:
    folder = write_checkpoint(tmp_path / "a", shards=3)
    stores.failing = {broken}
    with pytest.raises(PublishFailed):
        await stores.publish(folder, ONE)
    if broken != MANIFEST_FILE:  # then all of it is there, and is a checkpoint without a manifest
        with pytest.raises(ModelswapError):
            await stores.fetched(ONE)
    first, stores.failing = stores.names(ONE), set()
    stores.put.clear()
    done = await stores.publish(folder, ONE)
    second = {name for _, name in stores.put}
    assert second & first == set()
    assert first | second == {file.name for file in folder.iterdir()} | {MANIFEST_FILE}
    assert await stores.fetched(ONE) == (done.digest, contents(TENSORS))


async def test_what_broke_off_may_be_followed_by_another_version(stores: Stores, tmp_path: Path) -> None:
    stores.failing = {INDEX}
    with pytest.raises(PublishFailed):
        await stores.publish(write_checkpoint(tmp_path / "a", shards=2), ONE)
    stores.failing = set()
    new = trained(TENSORS, "a.weight", "b.weight")
    await stores.publish(write_checkpoint(tmp_path / "b", new, shards=2), ONE)
    assert (await stores.fetched(ONE))[1] == contents(new)


@pytest.mark.parametrize("base", ["", TWO])
async def test_a_checkpoint_without_a_manifest_is_not_touched(stores: Stores, tmp_path: Path, base: str) -> None:
    old = write_checkpoint(tmp_path / "a")
    await stores.publish(old, TWO)
    for file in old.iterdir():
        obstore.put(stores.store(ONE), file.name, file.read_bytes())
    stores.put.clear()
    with pytest.raises(AlreadyPublished, match="without a manifest"):
        await stores.publish(write_checkpoint(tmp_path / "b", trained(TENSORS, "a.weight")), ONE, base=base)
    assert stores.put == []


async def test_of_two_at_once_one_is_refused(stores: Stores, tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / name, trained(TENSORS, name)) for name in ("a.weight", "b.weight")]
    done = await asyncio.gather(*(stores.publish(folder, ONE) for folder in folders), return_exceptions=True)
    won = [result for result in done if not isinstance(result, BaseException)]
    lost = [result for result in done if isinstance(result, BaseException)]
    assert all(isinstance(error, AlreadyPublished | SourceChanged) for error in lost)
    assert len(won) <= 1
    if won:
        shown = await manifest_at(stores, ONE)
        assert shown.digest == won[0].digest


@pytest.mark.parametrize("same", [True, False])
async def test_a_manifest_that_came_a_moment_before(stores: Stores, tmp_path: Path, same: bool) -> None:
    folder = write_checkpoint(tmp_path / "a")
    other = folder if same else write_checkpoint(tmp_path / "b", trained(TENSORS, "a.weight"))
    shown = manifests.encode(build_manifest(other))
    stores.before["create"] = lambda: obstore.put(stores.store(ONE), MANIFEST_FILE, shown)
    if same:
        assert (await stores.publish(folder, ONE)).digest == build_manifest(folder).digest
    else:
        with pytest.raises(AlreadyPublished, match="meanwhile"):
            await stores.publish(folder, ONE)
    assert (await manifest_at(stores, ONE)) == build_manifest(other)


async def test_a_file_that_somebody_else_puts_there_is_seen(stores: Stores, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    other = write_checkpoint(tmp_path / "b", trained(TENSORS, "a.weight"))
    stores.before["show"] = lambda: obstore.put(stores.store(ONE), SINGLE, (other / SINGLE).read_bytes())
    with pytest.raises(SourceChanged, match="somebody else publishes here"):
        await stores.publish(folder, ONE)
    assert MANIFEST_FILE not in stores.names(ONE)


async def test_bytes_that_change_meanwhile_are_refused(stores: Stores, tmp_path: Path) -> None:
    version = read_folder(write_checkpoint(tmp_path / "a"))
    write_checkpoint(tmp_path / "a", trained(TENSORS, "a.weight"))
    with pytest.raises(SourceChanged):
        await stores.publish(version, ONE)
    assert SINGLE not in stores.names(ONE)


async def test_a_manifest_that_was_left_behind_is_not_believed(stores: Stores, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(build_manifest(folder)))
    assert (await stores.publish(folder, ONE)).files_sent == 2
    write_checkpoint(folder, trained(TENSORS, "a.weight"))
    with pytest.raises(ManifestMismatch, match="another version"):
        await stores.publish(folder, TWO)


async def test_a_base_must_be_a_published_version(stores: Stores, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    with pytest.raises(SourceNotFound):
        await stores.publish(folder, TWO, base=ONE)
    for file in folder.iterdir():
        obstore.put(stores.store(ONE), file.name, file.read_bytes())
    with pytest.raises(SourceNotFound, match="cannot be a base"):
        await stores.publish(folder, TWO, base=ONE)
    assert stores.names(TWO) == set()


async def manifest_at(stores: Stores, uri: str) -> Manifest:
    return manifests.decode(bytes(await obstore.get(stores.store(uri), MANIFEST_FILE).bytes_async()))


async def rewrite(stores: Stores, uri: str, name: str, **fields: Any) -> None:
    """Let a manifest say something else of a tensor, under a digest that fits."""
    found = await manifest_at(stores, uri)
    tensors: list[TensorEntry] = [
        msgspec.structs.replace(entry, **fields) if entry.name == name else entry for entry in found.tensors
    ]
    lie = Manifest(tensors=tuple(tensors), side_files=found.side_files, architecture=found.architecture)
    obstore.put(stores.store(uri), MANIFEST_FILE, manifests.encode(lie))


async def test_a_base_that_lies_of_places_is_refused(stores: Stores, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    await stores.publish(folder, ONE)
    offset = (await manifest_at(stores, ONE)).by_name["b.weight"].offset
    await rewrite(stores, ONE, "a.weight", offset=offset)
    with pytest.raises(ManifestMismatch, match=r"a\.weight"):
        await stores.publish(folder, TWO, base=ONE)


async def test_a_base_that_lies_of_bytes_is_seen_by_who_fetches(stores: Stores, tmp_path: Path) -> None:
    await stores.publish(write_checkpoint(tmp_path / "a"), ONE)
    new = write_checkpoint(tmp_path / "b", trained(TENSORS, "a.weight"))
    await rewrite(stores, ONE, "a.weight", sha256=build_manifest(new).by_name["a.weight"].sha256)
    await stores.publish(new, TWO, base=ONE)
    with pytest.raises(ManifestMismatch, match=r"tensor a\.weight .* does not hash"):
        await stores.fetched(TWO)


async def test_places_elsewhere_need_to_be_allowed(stores: Stores, tmp_path: Path) -> None:
    private = "s3://private/models"
    folder = write_checkpoint(tmp_path / "a")
    await stores.publish(folder, private)
    await stores.publish(folder, ONE, base=private, allow=("s3://private",))
    with pytest.raises(SourceNotAllowed):
        await stores.fetched(ONE)
    with pytest.raises(SourceNotAllowed):
        await stores.publish(folder, TWO, base=ONE)
    done = await stores.publish(folder, TWO, base=ONE, allow=("s3://private/models",))
    assert (await stores.fetched(TWO, allow=("s3://bucket", "s3://private/models")))[0] == done.digest


async def test_a_signature_goes_along_where_it_fits(stores: Stores, tmp_path: Path) -> None:
    key = write_key(tmp_path / "keys")
    signing = partial(sign, key=key.private)

    def signed_at(uri: str) -> None:
        shown, signature = (
            bytes(obstore.get(stores.store(uri), name).bytes()) for name in (MANIFEST_FILE, SIGNATURE_FILE)
        )
        evidence = Evidence(manifest=shown, signature=signature)
        verify(evidence, trusted=read_trusted([key.public]), now=datetime.now(UTC))

    folder = write_checkpoint(tmp_path / "a")
    given = msgspec.structs.replace(build_manifest(folder), provenance=Provenance(who="ci"))
    (folder / MANIFEST_FILE).write_bytes(manifests.encode(given))
    (folder / SIGNATURE_FILE).write_bytes(signing(manifests.encode(given)))
    await stores.publish(folder, ONE)
    signed_at(ONE)
    assert [name for _, name in stores.put][-2:] == [SIGNATURE_FILE, MANIFEST_FILE]
    await stores.publish(folder, TWO, base=ONE)
    assert (await manifest_at(stores, TWO)).provenance == Provenance(who="ci")
    assert SIGNATURE_FILE not in stores.names(TWO), "it was of another manifest"
    await stores.publish(folder, THREE, base=ONE, sign=signing)
    signed_at(THREE)


@pytest.mark.parametrize(
    "uri",
    ["s3://key:secret@bucket/a", "s3://bucket/a?X-Amz-Signature=secret", "s3://bucket/a/../b", "s3://bucket/a#secret"],
)
def test_uris_with_secrets_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(SourceNotAllowed) as caught:
        allowed_beside([uri])
    assert "secret" not in caught.value.message
