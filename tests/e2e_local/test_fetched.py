"""Versions in a real S3 server, swapped in by the whole engine process under load while the network fails."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import obstore
import pytest

from modelswap_engine.protocol.states import SwapState
from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.clients import load_on, makers
from tests.support.serve import Finished, Served
from tests.support.servers.faults import Truncated, throttled
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.s3 import KEY, REGION, SECRET, S3Server

pytestmark = [pytest.mark.model, pytest.mark.sources]


class Pod:
    """An engine process, and the proxy through which it sees the bucket; `options` are those of the bucket alone."""

    def __init__(self, served: Served, proxy: FaultProxy, bucket: str, options: Sequence[str]) -> None:
        self.served, self.proxy, self.bucket, self.options = served, proxy, bucket, options

    async def swap(self, version: str) -> Finished:
        options = ["--source", f"{self.bucket}/{version}", "--version", version, "--credentials", "reader"]
        return await asyncio.to_thread(self.served.command, "swap", *options)


@pytest.fixture(scope="module")
def process(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Iterator[Pod]:
    """One engine process for this file, on 1.0 and with an empty store; the bucket has 1.1 and 1.2."""
    from tests.support.models import write_variant

    folder = tmp_path_factory.mktemp("fetching")
    bucket, proxy = s3_server.bucket("fetched"), FaultProxy(s3_server.url)
    third = write_variant(pair / "v2", folder / "v3", ["lm_head.weight"], seed=5)
    for version, made in (("1.1", pair / "v2"), ("1.2", third)):
        for entry in made.iterdir():
            obstore.put(s3_server.store(bucket), f"tiny/{version}/{entry.name}", entry.read_bytes())
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}
    mounted = folder / "credentials"
    (mounted / "reader").mkdir(parents=True)
    for key, value in {**keys, "AWS_ENDPOINT": proxy.url, "AWS_ALLOW_HTTP": "true"}.items():
        (mounted / "reader" / key).write_text(value)
    options = ["--allow-source", f"s3://{bucket}/tiny", "--credentials-dir", str(mounted)]
    served = Served(folder, pair / "v1", options=["--version", "1.0", *options], roots=[pair])
    with contextlib.closing(proxy):
        yield Pod(served.start().wait_ready(), proxy, f"s3://{bucket}/tiny", options)
        served.stop()
        print(served.tail(lines=100))


@pytest.fixture
def pod(process: Pod) -> Pod:
    """That process, with nothing in its way any more."""
    process.proxy.heal()
    process.proxy.forget()
    return process


async def test_a_version_is_fetched_under_load_and_outlives_the_network(pod: Pod, pair: Path) -> None:
    served = pod.served
    async with load_on(served.data_url, streams=2, max_tokens=32) as load:
        await load.served_more(2)
        # What breaks off goes on; clients see nothing of it.
        pod.proxy.inject(Truncated(after=20_000), path="safetensors", times=2)
        done = await pod.swap("1.1")
        assert done.code == 0, done.out + done.err
        await load.served_more(2)
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0)
    assert set().union(*map(makers, load.answers)) == {"1.0", "1.1"}
    assert live_hashes(served) == file_hashes(pair / "v2")
    live = served.state().live
    assert live is not None
    assert live.uri == f"{pod.bucket}/1.1"
    # A pod that restarts needs nobody: neither the bucket nor its keys.
    pod.proxy.inject(throttled(503))
    asked = len(pod.proxy.seen)
    served.kill()
    served.start().wait_ready()
    assert live_hashes(served) == file_hashes(pair / "v2")
    assert len(pod.proxy.seen) == asked


async def test_what_cannot_be_fetched_leaves_the_old_version_serving(pod: Pod) -> None:
    served = pod.served
    before = live_hashes(served)
    pod.proxy.inject(throttled(503), path="safetensors")
    async with load_on(served.data_url, streams=2, max_tokens=16) as load:
        await load.served_more(1)
        done = await pod.swap("1.2")
        assert done.code != 0
        assert "503" in done.out + done.err
        await load.served_more(2)
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0)
    operation = served.state().operation
    assert operation is not None
    assert operation.state is SwapState.ABORTED
    assert SECRET not in done.out + done.err + served.log.read_text()
    assert live_hashes(served) == before


async def test_a_pod_starts_from_the_bucket_alone(pod: Pod, tmp_path: Path, pair: Path) -> None:
    """Nothing is mounted, nothing was assigned, and the store is empty."""
    uri = f"{pod.bucket}/1.1"
    options = [*pod.options, "--source-credentials", f"reader={pod.bucket}"]
    other = Served(tmp_path / "other", uri, options=options)
    try:
        other.start().wait_ready()
        live = other.state().live
        assert live is not None
        assert (live.version, live.uri) == ("1.1", uri)
        assert live_hashes(other) == file_hashes(pair / "v2")
    finally:
        other.stop()
        print(other.tail(lines=100))
