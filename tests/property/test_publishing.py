"""Whatever versions are published one on the other, whoever reads one gets it to the last bit."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.publishing.plan import plan_based
from tests.support.checkpoints import Tensor, write_checkpoint
from tests.support.published import Stores

NAMES = st.sampled_from([f"layers.{number}.weight" for number in range(6)])
# Few distinct contents: equal ones under other names are what goes wrong.
CONTENTS = st.sampled_from([("U8", (4,)), ("I8", (4,)), ("F32", (1,)), ("U8", (2, 2)), ("U8", (0,))])
TENSORS = st.dictionaries(
    NAMES, st.tuples(CONTENTS, st.sampled_from([b"\0\0\0\0", b"\1\1\1\1", b"\2\2\2\2"])), min_size=1
)
Given = dict[str, tuple[tuple[str, tuple[int, ...]], bytes]]


def tensors(given: Given) -> dict[str, Tensor]:
    return {name: (dtype, shape, data if 0 not in shape else b"") for name, ((dtype, shape), data) in given.items()}


@given(versions=st.lists(st.tuples(TENSORS, st.integers(0, 4), st.integers(1, 3)), min_size=2, max_size=5))
@settings(max_examples=15)
def test_every_version_resolves_to_its_bytes(versions: list[tuple[Given, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(published(Path(home), versions))


async def published(home: Path, versions: list[tuple[Given, int, int]]) -> None:
    stores, uris = Stores(home / "pods"), [f"s3://bucket/{number}" for number in range(len(versions))]
    digests = []
    for number, (drawn, base, shards) in enumerate(versions):
        wanted = tensors(drawn)
        folder = write_checkpoint(home / str(number), wanted, shards=min(shards, len(wanted)))
        done = await stores.publish(folder, uris[number], base=uris[base % number] if number and base else "")
        digests.append(done.digest)
        assert done.digest == build_manifest(folder).digest
    for uri, digest, (drawn, _, _) in zip(uris, digests, versions, strict=True):
        found, contents = await stores.fetched(uri)
        assert found == digest
        assert {name: data for name, data in contents.items() if name != "config.json"} == {
            name: data for name, (_, _, data) in tensors(drawn).items()
        }


@given(old=TENSORS, new=TENSORS)
def test_what_travels_is_what_differs(old: Given, new: Given) -> None:
    with tempfile.TemporaryDirectory() as home:
        base, version = (
            build_manifest(write_checkpoint(Path(home) / name, tensors(given)))
            for name, given in (("old", old), ("new", new))
        )
    plan = plan_based(version, {}, base=base, place="s3://bucket/old", shard_bytes=6)
    sent = {entry.name for upload in plan.uploads for entry in upload.tensors}
    assert sent == {name for name, tensor in tensors(new).items() if tensors(old).get(name) != tensor}
    assert plan.manifest.digest == version.digest
    assert {entry.place for entry in plan.manifest.tensors} <= {"", "s3://bucket/old"}
    for upload in plan.uploads:
        assert upload.name.startswith("changed-")
        assert all(plan.manifest.by_name[entry.name].file == upload.name for entry in upload.tensors)
