"""Two whole engine processes, options and all: what one has fetched the other takes from it."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.serve import Served
from tests.support.servers.places import NAMED, WebPlace, web_place

__all__ = ["web_place"]
pytestmark = [pytest.mark.model, pytest.mark.sources]


async def test_the_second_engine_asks_the_first(web_place: WebPlace, tmp_path: Path, pair: Path) -> None:
    """There is no manifest: the first has to hash everything, the second knows the digest and asks for the hashes."""
    await web_place.upload({entry.name: entry.read_bytes() for entry in (pair / "v2").iterdir()})
    (tmp_path / "peers").write_text("what-pods-show-each-other\n")
    options = ["--version", "1.0", "--credentials-dir", str(web_place.mounted), "--allow-private-redirects"]
    options += ["--allow-source", web_place.uri, "--source-credentials", f"{NAMED}={web_place.uri}"]
    options += ["--peer-token-file", str(tmp_path / "peers")]

    def served(name: str, peer: int) -> Served:
        more = ["--peers", f"localhost:{peer}"]
        return Served(tmp_path / name, pair / "v1", options=[*options, *more], roots=[pair])

    first = served("first", 9)
    second = served("second", first.control_port)
    sent, digest = [], ""
    try:
        for engine in (first, second):
            engine.start()
        for engine in (first, second):
            engine.wait_ready()
            web_place.proxy.forget()
            swap = ("swap", "--source", web_place.uri, "--version", "1.1", "--digest", digest)
            done = await asyncio.to_thread(engine.command, *swap)
            assert done.code == 0, done.out + done.err
            assert live_hashes(engine) == file_hashes(pair / "v2")
            sent.append(web_place.proxy.sent())
            digest = engine.state().live.digest  # type: ignore[union-attr]
        one, other = (engine.state().operation for engine in (first, second))
        assert one is not None
        assert other is not None
        assert (one.bytes_from_peers, other.bytes_fetched) == (0, 0)
        assert other.bytes_from_peers > 0
        assert sent[1] <= sent[0] - other.bytes_from_peers
        assert "what-pods-show-each-other" not in first.tail(lines=10_000) + second.tail(lines=10_000)
    finally:
        for engine in (first, second):
            engine.stop()
            print(engine.tail(lines=60))
