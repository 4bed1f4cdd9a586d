"""Two whole engine processes over one folder of a node: what one has fetched the other reads there, after a proof."""

import asyncio
from pathlib import Path

import pytest

from modelswap_engine.checkpoint import manifest as manifests
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.serve import Served
from tests.support.servers.places import NAMED, WebPlace, web_place

__all__ = ["web_place"]
pytestmark = [pytest.mark.model, pytest.mark.sources]


async def test_the_second_engine_fetches_nothing_but_what_was_spoiled(
    web_place: WebPlace, tmp_path: Path, pair: Path
) -> None:
    shipped = {entry.name: entry.read_bytes() for entry in (pair / "v2").iterdir()}
    built = build_manifest(pair / "v2")
    await web_place.upload(shipped | {MANIFEST_FILE: manifests.encode(built)})
    node = tmp_path / "node"
    node.mkdir()
    options = ["--version", "1.0", "--credentials-dir", str(web_place.mounted), "--allow-private-redirects"]
    options += ["--allow-source", web_place.uri, "--source-credentials", f"{NAMED}={web_place.uri}"]
    options += ["--store-dir", str(node), "--store-shared"]
    engines = [Served(tmp_path / name, pair / "v1", options=options, roots=[pair]) for name in ("first", "second")]
    first, second = engines
    fetched, sent = [], []
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        for engine in engines:
            web_place.proxy.forget()
            swap = ("swap", "--source", web_place.uri, "--version", "1.1", "--digest", built.digest)
            done = await asyncio.to_thread(engine.command, *swap)
            assert done.code == 0, done.out + done.err
            assert live_hashes(engine) == file_hashes(pair / "v2")
            operation = engine.state().operation
            assert operation is not None
            fetched.append(operation.bytes_fetched)
            sent.append(web_place.proxy.sent("safetensors$"))
        assert fetched[0] > 0
        assert fetched[1] == 0
        assert sent[1] == sent[0] - fetched[0], "both read the headers"
        assert len(list((node / "members").iterdir())) == 2
        # One that starts anew needs all of the version, of which the folder has what the swaps needed.
        second.kill()
        second.start().wait_ready()
        # A neighbour spoils a blob behind both: who needs it next fetches that one alone.
        spoiled = max((node / "blobs").glob("*/*"), key=lambda path: path.stat().st_size)
        spoiled.chmod(0o600)
        spoiled.write_bytes(bytes(spoiled.stat().st_size))
        web_place.proxy.forget()
        first.kill()
        first.start().wait_ready()
        assert web_place.proxy.sent("safetensors$") == spoiled.stat().st_size
        for engine in engines:
            assert live_hashes(engine) == file_hashes(pair / "v2")
    finally:
        for engine in engines:
            engine.stop()
            print(engine.tail(lines=60))
