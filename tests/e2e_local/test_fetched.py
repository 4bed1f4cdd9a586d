"""Versions in a real S3 server, swapped in by the whole engine process under load while the network fails."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import obstore
import pytest

from modelswap_engine.protocol.states import SwapState
from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.clients import load_on, makers
from tests.support.serve import Finished, Served
from tests.support.servers.faults import Truncated, throttled
from tests.support.servers.fixtures import Proxied
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.s3 import KEY, REGION, SECRET, S3Server

pytestmark = [pytest.mark.model, pytest.mark.sources]

_numbers = itertools.count(1)


class Pod:
    """An engine process, and the proxy through which it sees the bucket."""

    def __init__(self, served: Served, proxy: FaultProxy, uri: str, options: Sequence[str]) -> None:
        self.served, self.proxy, self.uri, self.options = served, proxy, uri, options

    async def swap(self) -> Finished:
        options = ["--source", self.uri, "--version", "1.1", "--credentials", "reader"]
        return await asyncio.to_thread(self.served.command, "swap", *options)


@pytest.fixture
def pod(s3_server: S3Server, proxied: Proxied, tmp_path: Path, pair: Path) -> Iterator[Pod]:
    bucket, proxy = s3_server.bucket(f"served-{next(_numbers)}"), proxied(s3_server.url)
    for entry in (pair / "v2").iterdir():
        obstore.put(s3_server.store(bucket), f"tiny/1.1/{entry.name}", entry.read_bytes())
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}
    mounted = tmp_path / "credentials"
    (mounted / "reader").mkdir(parents=True)
    for key, value in {**keys, "AWS_ENDPOINT": proxy.url, "AWS_ALLOW_HTTP": "true"}.items():
        (mounted / "reader" / key).write_text(value)
    options = ["--allow-source", f"s3://{bucket}/tiny", "--credentials-dir", str(mounted)]
    served = Served(tmp_path, pair / "v1", options=["--version", "1.0", *options], roots=[pair])
    yield Pod(served.start().wait_ready(), proxy, f"s3://{bucket}/tiny/1.1", options)
    served.stop()
    print(served.tail(lines=100))


async def test_a_version_is_fetched_under_load_and_outlives_the_network(pod: Pod, pair: Path) -> None:
    served = pod.served
    async with load_on(served.data_url, streams=2, max_tokens=32) as load:
        await load.served_more(2)
        # What breaks off goes on; clients see nothing of it.
        pod.proxy.inject(Truncated(after=20_000), path="safetensors", times=2)
        done = await pod.swap()
        assert done.code == 0, done.out + done.err
        await load.served_more(2)
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0)
    assert set().union(*map(makers, load.answers)) == {"1.0", "1.1"}
    assert live_hashes(served) == file_hashes(pair / "v2")
    live = served.state().live
    assert live is not None
    assert live.uri == pod.uri
    # A pod that restarts needs nobody: neither the bucket nor its keys.
    pod.proxy.inject(throttled(503))
    asked = len(pod.proxy.seen)
    served.kill()
    served.start().wait_ready()
    assert live_hashes(served) == file_hashes(pair / "v2")
    assert len(pod.proxy.seen) == asked


async def test_what_cannot_be_fetched_leaves_the_old_version_serving(pod: Pod, pair: Path) -> None:
    served = pod.served
    pod.proxy.inject(throttled(503), path="safetensors")
    async with load_on(served.data_url, streams=2, max_tokens=16) as load:
        await load.served_more(1)
        done = await pod.swap()
        assert done.code != 0
        assert "503" in done.out + done.err
        await load.served_more(2)
    summary = load.summary()
    assert (summary.failed, summary.mixed) == (0, 0)
    operation = served.state().operation
    assert operation is not None
    assert operation.state is SwapState.ABORTED
    assert SECRET not in done.out + done.err + served.log.read_text()
    assert live_hashes(served) == file_hashes(pair / "v1")


async def test_a_pod_starts_from_the_bucket_alone(pod: Pod, tmp_path: Path, pair: Path) -> None:
    """Nothing is mounted, nothing was assigned, and the store is empty."""
    bucket = pod.uri.removesuffix("/1.1")
    options = [*pod.options, "--source-credentials", f"reader={bucket}"]
    other = Served(tmp_path / "other", pod.uri, options=options)
    try:
        other.start().wait_ready()
        live = other.state().live
        assert live is not None
        assert (live.version, live.uri) == ("1.1", pod.uri)
        assert live_hashes(other) == file_hashes(pair / "v2")
    finally:
        other.stop()
        print(other.tail(lines=100))
