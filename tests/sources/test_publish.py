"""``modelswap publish``, ``manifest build`` and ``diff`` with servers of objects, behind a proxy that does wrong."""

import itertools
import json
import random
import tracemalloc
from pathlib import Path

import obstore
import pytest
import typer
from typer.testing import CliRunner, Result

from modelswap import publish as trainer
from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest
from modelswap_engine.cli import diff, manifest, publish
from modelswap_engine.delta.folder import apply_pack
from modelswap_engine.delta.layout import pack_name
from modelswap_engine.delta.local import opened_pack
from modelswap_engine.protocol.errors import (
    AlreadyPublished,
    BadRequest,
    ManifestMismatch,
    PublishFailed,
    SourceDenied,
    SourceNotAllowed,
    SourceUnreadable,
    UnsupportedScheme,
)
from modelswap_engine.publishing.anywhere import Anywhere
from modelswap_engine.publishing.folder import read_folder
from modelswap_engine.publishing.objects import PART_BYTES, PARTS_AT_ONCE, SENDING, ObjectPlace
from modelswap_engine.publishing.publisher import FILES_AT_ONCE
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.objects import ObjectStores
from tests.support.checkpoints import SINGLE, TENSORS, Tensor, write_checkpoint
from tests.support.deltas import folder_of
from tests.support.servers.faults import Answer, Reset, forbidden, throttled
from tests.support.servers.fixtures import Proxied
from tests.support.servers.hub import TOKEN, Hub
from tests.support.servers.places import NAMED, Place
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.stores import EVERYWHERE, ObjectServer, direct

pytestmark = pytest.mark.sources

_numbers = itertools.count(1)
app = typer.Typer()
for module in (publish, manifest, diff):
    module.register(app)


class Bucket:
    """A bucket of its own, behind a proxy; the process has its credentials in the environment."""

    def __init__(self, server: ObjectServer, proxy: FaultProxy) -> None:
        self.server, self.proxy = server, proxy
        self._name = server.bucket(f"published-{next(_numbers)}")
        self.direct = direct(server, self._name)

    def uri(self, path: str) -> str:
        return f"{self.server.scheme}://{self._name}/{path}"

    def read(self, path: str) -> bytes:
        return bytes(obstore.get(self.direct, path).bytes())

    def names(self, path: str) -> set[str]:
        return {str(meta["path"]).removeprefix(f"{path}/") for meta in obstore.list(self.direct, path).collect()}

    def manifest(self, path: str) -> Manifest:
        return manifests.decode(self.read(f"{path}/{MANIFEST_FILE}"))

    def sent(self) -> list[str]:
        """Names of objects that were written at once, or of which a first part was."""
        written = [*self.proxy.asked(method="PUT"), *self.proxy.asked(r"\?uploads=", method="POST")]
        paths = [seen.plain.partition("?")[0] for seen in self.proxy.seen if seen in written]
        return list(dict.fromkeys(path.rpartition("/")[2] for path in paths))


PART = "partNumber=|comp=block&"
"""What the path of a part's request holds."""


@pytest.fixture
def bucket(object_server: ObjectServer, proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket(object_server, proxied(object_server.url))
    for name, value in object_server.settings(made.proxy.url).items():
        monkeypatch.setenv(name, value)
    return made


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def large(byte: int = 0) -> dict[str, Tensor]:
    """Enough for several parts."""
    return TENSORS | {"large": ("U8", (3 * PART_BYTES,), bytes([byte]) * (3 * PART_BYTES))}


@EVERYWHERE
def test_a_version_and_what_is_new_in_the_next(bucket: Bucket, tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "a", large())
    done = run("publish", first, bucket.uri("chat/1"), "-o", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "digest": build_manifest(first).digest,
        "uri": bucket.uri("chat/1"),
        "bytesSent": sum(file.stat().st_size for file in first.iterdir()),
        "totalBytes": 28 + 3 * PART_BYTES,
        "filesSent": 2,
        "changedTensors": 4,
        "alreadyThere": False,
        "pack": None,
    }
    assert bucket.read(f"chat/1/{SINGLE}") == (first / SINGLE).read_bytes()
    assert bucket.sent()[-1] == MANIFEST_FILE
    again = run("publish", first, bucket.uri("chat/1"))
    assert again.exit_code == 0
    assert "already there" in again.stdout

    bucket.proxy.forget()
    second = write_checkpoint(tmp_path / "b", large() | {"b.weight": ("F32", (2,), bytes(8))})
    based = run("publish", second, bucket.uri("chat/2"), "--base", bucket.uri("chat/1"))
    assert based.exit_code == 0, based.output
    assert "all but 1 tensors" in based.stdout
    assert set(bucket.sent()) == {"config.json", "changed-00001-of-00001.safetensors", MANIFEST_FILE}
    assert bucket.manifest("chat/2").digest == build_manifest(second).digest

    shown = run("diff", bucket.uri("chat/1"), bucket.uri("chat/2"))
    assert shown.exit_code == 0, shown.output
    assert "1 of 4 tensors differ" in shown.stdout
    assert run("diff", second, bucket.uri("chat/2")).stdout.startswith("same content")


def tuned(step: int) -> dict[str, Tensor]:
    """Weights of which each step moves one element in a hundred."""
    data = bytearray(random.Random(0).randbytes(2 << 20))
    for number in range(1, step + 1):
        for at in random.Random(number).sample(range(0, len(data), 2), len(data) // 200):
            data[at] ^= 1
    return TENSORS | {"tuned": ("BF16", (len(data) // 2,), bytes(data))}


def test_a_pack_of_what_differs_lies_beside_the_version(bucket: Bucket, tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(step), tuned(step)) for step in range(2)]
    assert run("publish", folders[0], bucket.uri("chat/0")).exit_code == 0
    based = ("--base", bucket.uri("chat/0"))
    bucket.proxy.forget()
    done = run("publish", folders[1], bucket.uri("chat/1"), *based)
    assert done.exit_code == 0, done.output
    name = pack_name(build_manifest(folders[0]).digest)
    assert bucket.sent()[-2:] == [name, MANIFEST_FILE]
    assert f"delta         {name}: " in done.stdout
    assert done.stdout.rstrip().endswith("kB for 2.1 MB of tensors that differ")
    (tmp_path / "pack").write_bytes(bucket.read(f"chat/1/{name}"))
    with opened_pack(tmp_path / "pack") as pack:
        apply_pack(pack, folder_of(folders[0]), tmp_path / "made")
    assert build_manifest(tmp_path / "made").digest == build_manifest(folders[1]).digest

    bucket.proxy.forget()
    copied = run("publish", folders[1], bucket.uri("chat/2"), *based, "--base-dir", folders[0], "-o", "json")
    assert copied.exit_code == 0, copied.output
    assert json.loads(copied.stdout)["pack"]["bytes"] == (tmp_path / "pack").stat().st_size
    assert bucket.proxy.sent("chat/0/") < 100_000, "the base itself is not read"
    assert run("publish", folders[1], bucket.uri("chat/3"), *based, "--no-delta").exit_code == 0
    assert name not in bucket.names("chat/3")


def test_a_pack_that_cannot_be_had(bucket: Bucket, tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / str(step), tuned(step)) for step in range(2)]
    assert run("publish", folders[0], bucket.uri("chat/0")).exit_code == 0
    words = ("publish", folders[1], bucket.uri("chat/1"), "--base", bucket.uri("chat/0"))
    bucket.proxy.inject(Answer(403), path=r"\.delta", method="PUT")
    assert isinstance(run(*words, "--delta").exception, SourceDenied)
    assert MANIFEST_FILE not in bucket.names("chat/1")
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "delta         none: " in done.stdout
    assert bucket.manifest("chat/1").digest == build_manifest(folders[1]).digest
    assert isinstance(run(*words, "--base-dir", write_checkpoint(tmp_path / "x")).exception, ManifestMismatch)
    for mistake in (("--delta",), ("--base-dir", folders[0])):
        assert isinstance(run("publish", folders[1], bucket.uri("chat/4"), *mistake).exception, BadRequest)
    assert isinstance(run(*words, "--base-dir", folders[0], "--no-delta").exception, BadRequest)


def test_a_trainer_publishes_steps_with_packs(bucket: Bucket, tmp_path: Path) -> None:
    base, copy = "", None
    for step in range(3):
        folder = write_checkpoint(tmp_path / str(step), tuned(step))
        done = trainer.publish(folder, bucket.uri("chat"), version=str(step), base=base, base_folder=copy)
        assert (done.pack is None) == (step == 0)
        assert done.pack is None or 0 < done.pack.bytes < 2 * done.pack.dense_bytes / 30
        base, copy = done.uri, folder


@EVERYWHERE
def test_credentials_can_be_mounted(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounted" / "writer").mkdir(parents=True)
    for name, value in bucket.server.settings(bucket.proxy.url).items():
        monkeypatch.delenv(name)
        (tmp_path / "mounted" / "writer" / name).write_text(value)
    named = ("--credentials-dir", tmp_path / "mounted", "--credentials", "writer")
    folder = write_checkpoint(tmp_path / "a")
    done = run("publish", folder, bucket.uri("chat/1"), *named)
    assert done.exit_code == 0, done.output
    assert bucket.manifest("chat/1").digest == build_manifest(folder).digest


@EVERYWHERE
async def test_a_manifest_is_created_and_never_overwritten(bucket: Bucket) -> None:
    folder = await ObjectStores(Credentials(None), settings=SENDING).open(bucket.uri("chat/1"), credentials="")
    place = ObjectPlace(folder)
    for _ in range(2):  # the second time as if the answer to the first was lost
        await place.show(b"first", sent={})
    with pytest.raises(AlreadyPublished):
        await place.show(b"second", sent={})
    assert bucket.read(f"chat/1/{MANIFEST_FILE}") == b"first"


@EVERYWHERE
def test_a_manifest_is_built_where_the_checkpoint_lies(bucket: Bucket, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", large(), shards=2)
    for file in folder.iterdir():
        obstore.put(bucket.direct, f"chat/1/{file.name}", file.read_bytes())
    assert run("diff", folder, bucket.uri("chat/1")).stdout.startswith("same content")
    assert MANIFEST_FILE not in bucket.names("chat/1")
    bucket.proxy.forget()
    bucket.proxy.inject(Reset(after=1_000_000), path="safetensors$", skip=2, times=1)
    done = run("manifest", "build", bucket.uri("chat/1"), "--provenance", "who=ci", "-o", "json")
    assert done.exit_code == 0, done.output
    wanted = build_manifest(folder)
    found = bucket.manifest("chat/1")
    assert (found.tensors, found.side_files, found.digest) == (wanted.tensors, wanted.side_files, wanted.digest)
    assert json.loads(done.stdout)["digest"] == wanted.digest
    files = sum(file.stat().st_size for file in folder.iterdir())
    assert bucket.proxy.sent("chat/1/") <= files + 2_000_000, "all bytes travel once"
    assert isinstance(run("manifest", "build", bucket.uri("chat/1")).exception, AlreadyPublished)


@EVERYWHERE
def test_what_breaks_off_goes_on(bucket: Bucket, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", large())
    bucket.proxy.inject(Answer(400), path=MANIFEST_FILE, method="PUT", times=1)
    failed = run("publish", folder, bucket.uri("chat/1"))
    assert isinstance(failed.exception, PublishFailed), (failed.output, failed.exception)
    assert "manifest.json, bytes 0 to" in failed.exception.message
    bucket.proxy.forget()
    again = run("publish", folder, bucket.uri("chat/1"), "-o", "json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["bytesSent"] == 0
    assert bucket.sent() == [MANIFEST_FILE]
    assert bucket.manifest("chat/1").digest == build_manifest(folder).digest


@EVERYWHERE
def test_parts_that_fail_are_sent_again(bucket: Bucket, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", large())
    bucket.proxy.inject(throttled(), path=PART, method="PUT", skip=1, times=1)
    bucket.proxy.inject(Reset(), path=PART, method="PUT", skip=1, times=1)
    done = run("publish", folder, bucket.uri("chat/1"))
    assert done.exit_code == 0, done.output
    assert bucket.read(f"chat/1/{SINGLE}") == (folder / SINGLE).read_bytes()


@EVERYWHERE
def test_a_file_that_lasts_to_fail_is_aborted(bucket: Bucket, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", large())
    bucket.proxy.inject(Answer(400, {}, b"no"), path=PART, method="PUT", skip=1)
    failed = run("publish", folder, bucket.uri("chat/1"))
    assert isinstance(failed.exception, PublishFailed), (failed.output, failed.exception)
    assert f"{SINGLE}, bytes 0 to" in failed.exception.message
    assert bucket.names("chat/1") <= {"config.json"}
    if bucket.server.scheme != "az":  # which drops blocks that no list names by itself
        assert bucket.proxy.asked("uploadId", method="DELETE"), "its parts are not left behind"


@EVERYWHERE
def test_credentials_that_do_not_suffice(bucket: Bucket, tmp_path: Path) -> None:
    bucket.proxy.inject(forbidden(), method="PUT")
    failed = run("publish", write_checkpoint(tmp_path / "a"), bucket.uri("chat/1"))
    assert isinstance(failed.exception, SourceDenied)
    assert "may not be written" in failed.exception.message
    assert bucket.server.secret not in failed.exception.message


def test_a_store_without_conditions(bucket: Bucket, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    bucket.proxy.inject(Answer(501), path=MANIFEST_FILE, method="PUT", times=1)
    done = run("publish", folder, bucket.uri("chat/1"))
    assert done.exit_code == 0, done.output
    assert bucket.manifest("chat/1").digest == build_manifest(folder).digest


def test_a_base_that_cannot_be_read(bucket: Bucket, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    bucket.proxy.inject(Answer(400), path="list-type")
    failed = run("publish", folder, bucket.uri("chat/2"), "--base", bucket.uri("chat/1"))
    assert isinstance(failed.exception, SourceUnreadable)
    assert bucket.sent() == []


async def test_memory_does_not_grow_with_the_version(bucket: Bucket, tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "a", {f"t{n}": ("U8", (24 << 20,), bytes(24 << 20)) for n in range(8)}, shards=8
    )
    version = read_folder(folder)
    tracemalloc.start()
    try:
        await Anywhere().publish(lambda _: version, bucket.uri("chat/1"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What the client holds beside Python's memory is its window: parts in flight.
    assert peak < FILES_AT_ONCE * (PARTS_AT_ONCE + 2) * PART_BYTES < 8 * (24 << 20) + PART_BYTES


async def test_checkpoints_are_compared_wherever_they_lie(place: Place, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", shards=2)
    await place.upload({file.name: file.read_bytes() for file in folder.iterdir()})
    found = await Anywhere(credentials=NAMED, opener=place.opener).manifest(place.uri)
    assert found.digest == build_manifest(folder).digest


def test_every_kind_of_place_is_known_to_the_commands(
    hub: Hub, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "a")
    commit = hub.commit("org/chat", {file.name: file.read_bytes() for file in folder.iterdir()})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    there = f"hf://org/chat@{commit}"
    assert isinstance(run("diff", there, folder).exception, SourceNotAllowed), "the hub sends elsewhere for big files"
    same = run("diff", there, folder.as_uri(), "--allow-source", "https://localhost")
    assert same.exit_code == 0, same.output
    assert same.stdout.startswith("same content")
    refused = run("publish", folder, "hf://org/chat")
    assert isinstance(refused.exception, UnsupportedScheme)
    assert "s3:" in refused.exception.advice
