"""Weights that leave: to groups of allowed peers, to new folders below allowed roots, a few numbers to a person."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, decode
from modelswap_engine.protocol.errors import (
    BadRequest,
    Busy,
    IncompatibleModel,
    NotFound,
    NotReady,
    PeerNotAllowed,
    SourceNotAllowed,
    SourceUnreadable,
    UnknownGroup,
    UnsupportedScheme,
)
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.transfers import JoinGroupRequest, ReadRequest, SaveRequest, SendRequest
from modelswap_engine.protocol.updates import Announced, BeginUpdate, BroadcastPart, CommitUpdate
from modelswap_engine.swap.trainer.peers import Peers
from tests.support.fake_backend import Fault
from tests.support.fake_source import FakeCheckpoint
from tests.support.swapping import World, checkpoint

NORM = b"N" * 2


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "pod", export_roots=(tmp_path / "out",), weight_peers=("127.0.0.0/8", "10.1.0.0/16"))
    await made.start()
    yield made
    assert made.backend.violations == []
    await made.stop()


async def run(world: World, work: Any) -> Any:
    return await world.clock.run(work)


def group(name: str = "g", address: str = "127.0.0.1", **facts: Any) -> JoinGroupRequest:
    """A trainer and the two ranks of the engine."""
    return JoinGroupRequest(group=name, address=address, port=29500, **({"rank": 1, "size": 3} | facts))


# Groups.


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "localhost", "127.1"])
async def test_peers_in_allowed_networks(world: World, address: str) -> None:
    await run(world, world.coordinator.export.join(group(address=address)))
    joined = world.backend.outside.groups["g"]
    assert joined.address == (address if address == "10.1.2.3" else "127.0.0.1")  # the checked one, not the name
    assert (joined.port, joined.rank, joined.size, joined.backend) == (29500, 1, 3, "gloo")


@pytest.mark.parametrize("address", ["10.2.0.1", "8.8.8.8", "::1", "169.254.169.254", "\0"])
async def test_nobody_else(world: World, address: str) -> None:
    with pytest.raises(PeerNotAllowed):
        await run(world, world.coordinator.export.join(group(address=address)))
    assert world.backend.outside.groups == {}


def test_a_name_stands_for_the_address_that_was_checked() -> None:
    answers = {"both": ["8.8.8.8", "10.1.0.9"], "none": [], "outside": ["8.8.8.8"]}
    peers = Peers(["10.1.0.0/16", "fd00::/8"], lookup=lambda host: answers[host])
    assert peers.admit("both") == "10.1.0.9"
    assert peers.admit("fd00::5") == "fd00::5"
    for host in ("none", "outside"):
        with pytest.raises(PeerNotAllowed):
            peers.admit(host)
    with pytest.raises(BadRequest):
        Peers(["10.1.0.0/33"])


async def test_an_unknown_group_is_a_typed_error_everywhere(world: World) -> None:
    export = world.coordinator.export
    await run(world, world.coordinator.updates.begin(BeginUpdate(update_id="u")))
    for call in (
        export.leave("x"),
        export.send("x", SendRequest()),
        world.coordinator.parts.broadcast("u", BroadcastPart(group="x")),
    ):
        with pytest.raises(UnknownGroup):
            await run(world, call)
    await run(world, export.join(group()))
    with pytest.raises(Busy):
        await run(world, export.join(group()))
    await run(world, export.leave("g"))
    with pytest.raises(UnknownGroup):
        await run(world, export.leave("g"))


async def test_every_rank_that_joins_has_a_place(world: World) -> None:
    export = world.coordinator.export
    with pytest.raises(BadRequest, match="takes 2 places from 1 on"):
        await run(world, export.join(group(size=2)))
    assert world.backend.outside.groups == {}
    await run(world, export.join(group(size=2, sends=True)))  # only the first rank goes
    assert world.backend.outside.groups["g"].sends


async def test_what_a_trainer_broadcasts(world: World) -> None:
    coordinator = world.coordinator
    await run(world, coordinator.export.join(group()))
    await run(world, coordinator.updates.begin(BeginUpdate(update_id="u")))
    world.backend.outside.coming = {"norm": NORM, "q": b"Q" * 4}
    announced = [Announced(name="norm", dtype="U8", shape=[2]), Announced(name="q", dtype="U8", shape=[4])]
    state = await run(world, coordinator.parts.broadcast("u", BroadcastPart(group="g", tensors=announced)))
    assert (state.tensors, state.sources) == (2, ["distributed"])
    wrong = [Announced(name="norm", dtype="U8", shape=[3])]
    with pytest.raises(IncompatibleModel):  # refused before anybody waits for a sender
        await run(world, coordinator.parts.broadcast("u", BroadcastPart(group="g", tensors=wrong)))
    status = await run(world, coordinator.updates.commit("u", CommitUpdate()))
    assert status.state is SwapState.SERVING
    assert world.backend.live == checkpoint(norm=NORM, q=b"Q" * 4).tensors


async def test_all_that_one_engine_sends_is_what_another_takes(world: World, tmp_path: Path) -> None:
    await run(world, world.coordinator.export.join(group()))
    result = await run(world, world.coordinator.export.send("g", SendRequest()))
    assert result.digest == world.template.digest
    assert (result.tensors, result.bytes) == (4, 18)
    new = World(tmp_path / "new")
    new.template = new.publish("0.9", checkpoint(norm=NORM, embed=b"0" * 8))
    await new.start()
    await run(new, new.coordinator.export.join(group()))
    new.backend.outside.coming = world.backend.outside.sent["g"]
    await run(new, new.coordinator.updates.begin(BeginUpdate(update_id="u")))
    await run(new, new.coordinator.parts.broadcast("u", BroadcastPart(group="g")))
    status = await run(new, new.coordinator.updates.commit("u", CommitUpdate(digest=result.digest)))
    assert status.state is SwapState.SERVING
    assert new.backend.live == world.backend.live
    await new.stop()


async def test_a_swap_ends_an_export(world: World) -> None:
    await run(world, world.coordinator.export.join(group()))
    world.backend.faults["transfer"] = Fault.HANG
    sending = asyncio.ensure_future(world.coordinator.export.send("g", SendRequest()))
    await world.clock.settle()
    status = await world.swap(world.publish("1.1", checkpoint(norm=NORM)))
    assert status.state is SwapState.SERVING
    with pytest.raises(Busy):
        await sending


# Folders.


async def test_a_saved_version_is_a_checkpoint(world: World, tmp_path: Path) -> None:
    target = tmp_path / "out" / "deep" / "v"
    result = await run(world, world.coordinator.export.save(SaveRequest(uri=target.as_uri())))
    assert (result.digest, result.files, result.bytes) == (world.template.digest, ["model.safetensors"], 18)
    assert build_manifest(target).digest == world.template.digest
    shipped = decode((target / MANIFEST_FILE).read_bytes())
    assert shipped == build_manifest(target)
    assert [path.name for path in target.parent.iterdir()] == ["v"]
    with pytest.raises(Busy):
        await run(world, world.coordinator.export.save(SaveRequest(uri=target.as_uri())))


async def test_files_are_bounded(world: World, tmp_path: Path) -> None:
    target = tmp_path / "out" / "v"
    result = await run(world, world.coordinator.export.save(SaveRequest(uri=target.as_uri(), shard_bytes=6)))
    # embed (8) is larger than a file may be, k and norm (4 + 2) fit into one, q (4) is left.
    assert len(result.files) == 3
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 18
    assert set(index["weight_map"]) == {"embed", "k", "norm", "q"}
    assert build_manifest(target).digest == world.template.digest


@pytest.mark.parametrize(
    "uri",
    ["file:///etc/x", "file://{out}/../x", "file://{out}", "file://{out}/..", "s3://x/y", "{out}/x", "file://host/x",
     "file://{out}/link/x", "file://{out}/%00", "file://{out}/" + "a" * 300],
)  # fmt: skip
async def test_no_folder_outside_the_roots(world: World, tmp_path: Path, uri: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(tmp_path)
    with pytest.raises((SourceNotAllowed, UnsupportedScheme)):
        await run(world, world.coordinator.export.save(SaveRequest(uri=uri.replace("{out}", str(out)))))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "pod"]
    assert [path.name for path in out.iterdir()] == ["link"]


async def test_without_an_export_root_nothing_is_written(tmp_path: Path) -> None:
    made = World(tmp_path / "pod")
    await made.start()
    with pytest.raises(SourceNotAllowed):
        await run(made, made.coordinator.export.save(SaveRequest(uri=(tmp_path / "x").as_uri())))
    await made.stop()


async def test_what_fails_leaves_no_folder(world: World, tmp_path: Path) -> None:
    world.backend.faults["transfer"] = Fault.ERROR
    with pytest.raises(SourceUnreadable):
        await run(world, world.coordinator.export.save(SaveRequest(uri=(tmp_path / "out" / "v").as_uri())))
    assert list((tmp_path / "out").iterdir()) == []


async def test_saving_a_sent_version_makes_it_last(world: World, tmp_path: Path) -> None:
    coordinator, uri = world.coordinator, (tmp_path / "out" / "v").as_uri()
    await run(world, coordinator.export.join(group()))
    await run(world, coordinator.updates.begin(BeginUpdate(update_id="u")))
    world.backend.outside.coming = {"norm": NORM}
    announced = [Announced(name="norm", dtype="U8", shape=[2])]
    await run(world, coordinator.parts.broadcast("u", BroadcastPart(group="g", tensors=announced)))
    await run(world, coordinator.updates.commit("u", CommitUpdate(version="step-1")))
    before = world.state.live
    assert not (await run(world, coordinator.export.save(SaveRequest(uri=uri)))).lasting  # nobody may read there
    world.sources.checkpoints[uri + "2"] = FakeCheckpoint(checkpoint(norm=NORM).tensors)
    assert (await run(world, coordinator.export.save(SaveRequest(uri=uri + "2")))).lasting
    live = world.state.live
    assert before is not None
    assert live is not None
    assert (live.version, live.digest, live.uri) == ("step-1", before.digest, uri + "2")
    await world.crash()
    await world.start()
    assert world.state.live == live
    assert world.backend.live == checkpoint(norm=NORM).tensors


# Numbers.


async def test_numbers_of_a_tensor(world: World) -> None:
    result = await run(world, world.coordinator.export.read(ReadRequest(name="embed", rows=3)))
    assert (result.dtype, result.shape, result.numbers) == ("U8", [3], [101.0, 101.0, 101.0])
    with pytest.raises(NotFound):
        await run(world, world.coordinator.export.read(ReadRequest(name="nothing")))


async def test_an_engine_without_weights_gives_none_out(tmp_path: Path) -> None:
    made = World(tmp_path / "pod", export_roots=(tmp_path,))
    for call in (
        made.coordinator.export.read(ReadRequest(name="embed")),
        made.coordinator.export.send("g", SendRequest()),
        made.coordinator.export.save(SaveRequest(uri=(tmp_path / "v").as_uri())),
    ):
        with pytest.raises(NotReady):
            await run(made, call)
    await made.stop()
