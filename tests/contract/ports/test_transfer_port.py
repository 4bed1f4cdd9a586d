"""The routes of process groups and of weights that leave, over real sockets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.version import CONTROL_PREFIX
from tests.support.ports import Ports

GROUP = {"group": "g", "address": "127.0.0.1", "port": 29500, "rank": 1, "size": 2}


async def post(ports: Ports, path: str, **body: Any) -> tuple[int, Any]:
    async with ports.control.post(CONTROL_PREFIX + path, json=body) as response:
        return response.status, await response.json() if response.status != 204 else None


async def test_a_group_from_its_meeting_to_its_end(ports: Ports) -> None:
    assert await post(ports, "/groups", **GROUP) == (204, None)
    assert (await post(ports, "/groups", **GROUP))[0] == 409
    await post(ports, "/updates", updateId="u")
    ports.backend.outside.coming = {"norm": b"N" * 2}
    announced = [{"name": "norm", "dtype": "U8", "shape": [2]}]
    status, state = await post(ports, "/updates/u/broadcast", group="g", tensors=announced, flattened=True)
    assert (status, state["sources"]) == (200, ["distributed"])
    await post(ports, "/updates/u/abort")
    status, sent = await post(ports, "/groups/g/send")
    assert (status, sent) == (200, {"digest": ports.template.digest, "tensors": 2, "bytes": 10})
    assert ports.backend.outside.sent["g"] == ports.backend.live
    assert await post(ports, "/groups/g/leave") == (204, None)
    status, answer = await post(ports, "/groups/g/leave")
    assert (status, answer["error"]["code"]) == (404, "UnknownGroup")


@pytest.mark.parametrize(
    "change", [{"address": "8.8.8.8"}, {"port": 0}, {"size": 1}, {"rank": -1}, {"backend": "mpi"}, {"group": ""}]
)
async def test_groups_that_cannot_be(ports: Ports, change: dict[str, Any]) -> None:
    status, answer = await post(ports, "/groups", **(GROUP | change))
    expected = (422, "PeerNotAllowed") if "address" in change else (400, "BadRequest")
    assert (status, answer["error"]["code"]) == expected
    assert ports.backend.outside.groups == {}


async def test_the_live_version_is_saved(ports: Ports, tmp_path: Path) -> None:
    target = tmp_path / "out" / "v"
    status, answer = await post(ports, "/export/save", uri=target.as_uri())
    assert (status, answer["digest"], answer["lasting"]) == (201, ports.template.digest, True)
    assert (await asyncio.to_thread(build_manifest, target)).digest == ports.template.digest
    status, answer = await post(ports, "/export/save", uri="file:///etc/x")
    assert (status, answer["error"]["code"]) == (422, "SourceNotAllowed")


async def test_numbers_of_a_tensor(ports: Ports) -> None:
    status, answer = await post(ports, "/export/read", name="norm", rows=1)
    assert (status, answer) == (200, {"name": "norm", "dtype": "U8", "shape": [1], "numbers": [110.0]})
