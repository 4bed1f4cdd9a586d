"""Versions in a bucket, on a real cluster: fetched ahead, once for both pods, and taken only when they are signed."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.answers import mixed_by_text
from demo.load import Load
from demo.object_store import IMAGE, ObjectStore
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, Manifest, decode
from tests.support.cluster.provider import DATA_NODE_PORT, Cluster
from tests.support.gitops_steps import digest_of, identity, proved
from tests.support.models import LOWER, UPPER
from tests.support.signers import KeyPair, write_key
from tests.support.stack import Slot, build_images, embedded_values

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_NAME = "bucketed"
_KEYS = "release-keys"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return write_key(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def bucket(cluster: Cluster, models: Path, keys: KeyPair) -> ObjectStore:
    """An S3 server in the slot's namespace: 1.0 and 1.1 are signed, 1.2 is not."""
    build_images(cluster, IMAGE)
    cluster.kubectl("create", "namespace", _NAME)
    store = ObjectStore(cluster, namespace=_NAME, folder=_NAME)
    store.install()
    signed = ("--sign", str(keys.private), "--provenance", "job=train-41")
    store.publish(models / "v1", "1.0", options=signed)
    store.publish(models / "v2", "1.1", base="1.0", options=signed)
    store.publish(models / "v3", "1.2")
    return store


@pytest.fixture(scope="module")
def bucketed(cluster: Cluster, models: Path, bucket: ObjectStore, keys: KeyPair) -> Iterator[Slot]:
    """Two pods that start with 1.0 from the bucket, with no folder of models."""
    cluster.kubectl("-n", _NAME, "create", "configmap", _KEYS, f"--from-file={keys.public}")
    slot = Slot(cluster, name=_NAME, models=models)
    values = embedded_values({}) | bucket.values()
    values |= {"model": {"path": bucket.uri("1.0"), "version": "1.0"}, "models": {}}
    values |= {"verification": {"required": True, "keys": {"configMap": _KEYS}}}
    slot.install(replicas=2, model="v1", version="1.0", node_port=DATA_NODE_PORT, engine=values)
    yield slot
    cluster.kubectl("-n", _NAME, "delete", "services", "--all")  # the node port is needed again
    slot.uninstall(wait=False)


def look_again(slot: Slot) -> None:
    """Ask for a look at the source now."""
    asked = f"modelswap.dev/requestedAt={uuid.uuid4()}"
    slot.cluster.kubectl("-n", slot.namespace, "annotate", "modelversion", slot.name, "--overwrite", asked)


def changed_bytes(old: Manifest, new: Manifest) -> int:
    return sum(entry.nbytes for entry in new.tensors if old.by_name[entry.name].sha256 != entry.sha256)


async def test_versions_come_once_ahead_of_their_time_and_signed(bucketed: Slot, bucket: ObjectStore) -> None:
    slot, before = bucketed, identity(bucketed.pods())
    old, new = (decode((slot.models / name / MANIFEST_FILE).read_bytes()) for name in ("v1", "v2"))

    async def apply(version: str, **spec: Any) -> int:
        return await asyncio.to_thread(slot.apply, version, "", source={"uri": bucket.uri(version)}, **spec)

    async with Load(
        slot.cluster.data_url, model=slot.name, streams=2, max_tokens=32, mixed=mixed_by_text(LOWER, UPPER)
    ) as load:
        await asyncio.to_thread(slot.wait_ready, await apply("1.0", prefetch=[{"uri": bucket.uri("1.1")}]))
        await asyncio.to_thread(slot.wait_field, "{.status.prefetch[0].fetchedPods}=2")
        ahead = [
            state.prefetch[0] for state in [await asyncio.to_thread(slot.state, pod) for pod in slot.pods().values()]
        ]
        assert {row.digest for row in ahead} == {new.digest}
        changed = changed_bytes(old, new)
        assert [row.bytes_fetched + row.bytes_from_peers for row in ahead] == [changed, changed]
        assert sum(row.bytes_fetched for row in ahead) == changed, "the bucket was asked by one pod for both"
        await load.served_more(4)

        await asyncio.to_thread(slot.wait_ready, await apply("1.1"))
        (revision,) = [row for row in slot.get()["status"]["history"] if row["digest"] == new.digest]
        assert revision.get("bytesFetched", 0) == 0, "all was there"
        assert revision["signedBy"].startswith("key release.pub")
        assert revision["provenance"]["job"] == "train-41"
        await load.served_more(4)

        await asyncio.to_thread(bucket.put, slot.models / "v4", "1.1")  # over what the pods serve
        await asyncio.to_thread(look_again, slot)
        await asyncio.to_thread(slot.wait_condition, "SourceDrifted")
        assert slot.condition("Ready")["status"] == "True"

        await asyncio.to_thread(slot.wait_stalled, await apply("1.2"))
        assert "SignatureMissing" in json.dumps(slot.get()["status"]["conditions"])
        assert await asyncio.to_thread(proved, slot) == {digest_of(slot, "v2")}
        await load.served_more(4)
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0), summary.lines()
    assert set(summary.by_version) == {"1.0", "1.1"}
    assert identity(slot.pods()) == before
