"""Versions from a web server, a registry and a hub, one after the other, swapped in by one whole engine process."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e_local.test_swap import file_hashes, live_hashes
from tests.support.serve import Served
from tests.support.servers.places import (
    NAMED,
    HubPlace,
    RegistryPlace,
    WebPlace,
    hub_place,
    registry_place,
    web_place,
)

__all__ = ["hub_place", "registry_place", "web_place"]
pytestmark = [pytest.mark.model, pytest.mark.sources]


async def test_each_scheme_is_swapped_in(
    web_place: WebPlace, registry_place: RegistryPlace, hub_place: HubPlace, tmp_path: Path, pair: Path
) -> None:
    versions = [(web_place, pair / "v2"), (registry_place, pair / "v1"), (hub_place, pair / "v2")]
    options = ["--version", "1.0", "--credentials-dir", str(web_place.mounted), "--allow-private-redirects"]
    for place, folder in versions:
        await place.upload({entry.name: entry.read_bytes() for entry in folder.iterdir()})
        prefix = place.uri.removesuffix(":1.0")
        options += ["--allow-source", prefix, "--source-credentials", f"{NAMED}={prefix}"]
    served = Served(tmp_path, pair / "v1", options=options, roots=[pair])
    served.start().wait_ready()
    try:
        for number, (place, folder) in enumerate(versions):
            swap = ("swap", "--source", place.uri, "--version", f"1.{number + 1}")
            done = await asyncio.to_thread(served.command, *swap)
            assert done.code == 0, done.out + done.err
            assert live_hashes(served) == file_hashes(folder)
            live = served.state().live
            assert live is not None
            assert live.uri == place.uri
        assert "not-a-secret" not in served.tail(lines=10_000)
    finally:
        served.stop()
