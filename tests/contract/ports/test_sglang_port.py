"""SGLang's control routes, as trainers call them: answers in SGLang's shape, one transaction behind them."""

import asyncio
import base64
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget, WeightsPolicy
from modelswap_engine.protocol.errors import Busy
from modelswap_engine.protocol.policy import TrafficMode
from tests.support.fake_backend import Fault
from tests.support.fake_source import FakeCheckpoint
from tests.support.ports import Ports, side_files
from tests.support.tensor_files import packed

BASE = "/compat/sglang"
NORM, EMBED = b"N" * 2, b"E" * 8
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
GROUP = {"master_address": "127.0.0.1", "master_port": "29500", "rank_offset": 1, "world_size": 2, "backend": "gloo"}
NORM_SENT = {"names": ["norm"], "dtypes": ["torch.uint8"], "shapes": [[2]], "group_name": "g"}


async def post(pod: Ports, route: str, body: Any = None, **fields: Any) -> tuple[int, Any]:
    async with pod.control.post(f"{BASE}/{route}", json=fields or body) as response:
        return response.status, await response.json()


async def get(ports: Ports, route: str, **query: str) -> tuple[int, Any]:
    async with ports.control.get(f"{BASE}/{route}", params=query) as response:
        return response.status, await response.json()


async def send(ports: Ports, *, version: str = "", **tensors: bytes) -> tuple[int, Any]:
    query = {"weight_version": version} if version else {}
    headers = {"Content-Type": "application/octet-stream"}
    async with ports.control.post(
        f"{BASE}/update_weights_from_tensor", data=packed(tensors), headers=headers, params=query
    ) as response:
        return response.status, await response.json()


def serves(ports: Ports, **changed: bytes) -> bool:
    wanted = FakeCheckpoint({"embed": b"e" * 8, "norm": b"n" * 2} | changed, side=side_files())
    live = ports.coordinator.live
    return ports.backend.live == wanted.tensors and live is not None and live.digest == wanted.digest


def commits(ports: Ports) -> int:
    return ports.backend.steps.count("commit")


# One transaction.


async def test_pause_to_continue_is_one_transaction(ports: Ports) -> None:
    assert await post(ports, "pause_generation", {}) == (200, PAUSED)
    async with ports.control.get(f"{BASE}/flush_cache") as response:
        assert (response.status, (await response.text()).startswith("Cache flushed.")) == (200, True)
    await post(ports, "init_weights_update_group", group_name="g", **GROUP)
    ports.backend.outside.coming = {"norm": NORM, "embed": EMBED}
    sent = {"group_name": "g", "flush_cache": False, "weight_version": "7"}
    for name, size in (("norm", 2), ("embed", 8)):
        status, answer = await post(
            ports, "update_weights_from_distributed", names=[name], dtypes=["uint8"], shapes=[[size]], **sent
        )
        assert (status, answer["success"]) == (200, True)
    assert serves(ports)
    assert (await get(ports, "model_info"))[1]["weight_version"] == "1.0"
    assert await post(ports, "continue_generation", {}) == (200, CONTINUED)
    assert serves(ports, norm=NORM, embed=EMBED)
    assert commits(ports) == 1
    assert ports.backend.policies == [RequestPolicy.ABORT]
    assert (await get(ports, "get_weight_version"))[1] == {"weight_version": "7"}
    assert ports.coordinator.state().gate.open
    # The next step of the training.
    await post(ports, "pause_generation", mode="retract")
    ports.backend.outside.coming = {"norm": b"M" * 2}
    await post(ports, "update_weights_from_distributed", **NORM_SENT)
    await post(ports, "continue_generation", {})
    assert serves(ports, norm=b"M" * 2, embed=EMBED)
    assert ports.backend.policies[-1] is RequestPolicy.RECOMPUTE


async def test_begin_to_end_is_one_transaction(ports: Ports) -> None:
    assert await post(ports, "begin_weight_update", selector="target") == (200, {"success": True, "message": "Success"})
    for tensors in ({"norm": NORM}, {"embed": EMBED}):
        assert await send(ports, **tensors) == (200, {"success": True, "message": "Success"})
    assert serves(ports)
    assert (await post(ports, "begin_weight_update", {}))[0] == 409
    assert (await post(ports, "end_weight_update", {}))[0] == 200
    assert serves(ports, norm=NORM, embed=EMBED)
    assert commits(ports) == 1
    status, answer = await post(ports, "end_weight_update", {})
    assert (status, answer["success"]) == (400, False)


async def test_begin_and_end_within_a_pause(ports: Ports) -> None:
    await post(ports, "pause_generation", mode="retract")
    await post(ports, "begin_weight_update", {})
    await send(ports, norm=NORM)
    await post(ports, "end_weight_update", {})
    assert serves(ports, norm=NORM)  # at its end, not at the pause's
    assert not ports.coordinator.state().gate.open
    await post(ports, "continue_generation", {})
    assert commits(ports) == 1
    assert ports.coordinator.state().gate.open


async def test_a_call_outside_both_is_an_update_of_its_own(ports: Ports) -> None:
    other = ports.publish("1.1", embed=EMBED)
    status, answer = await post(ports, "update_weights_from_disk", model_path="/models/1.1", weight_version="B1")
    message = "Succeeded to update model weights. Weight version updated to B1."
    assert (status, answer) == (200, {"success": True, "message": message, "num_paused_requests": 0})
    assert serves(ports, embed=EMBED)
    live = ports.coordinator.live
    assert live is not None
    assert (live.version, live.uri) == ("B1", other.uri)  # it has a place, so it outlives the process
    assert (await send(ports, norm=NORM, version="B2"))[0] == 200
    assert serves(ports, embed=EMBED, norm=NORM)
    assert commits(ports) == 2
    assert ports.backend.policies[-1] is RequestPolicy.NONE_RUNNING


async def test_a_checkpoint_that_was_saved_during_a_pause(ports: Ports) -> None:
    """As AReaL calls: no bodies where nothing is to be said, and fields that mean nothing here."""
    ports.publish("2.0", norm=NORM)
    assert await post(ports, "pause_generation") == (200, PAUSED)
    status, answer = await post(
        ports, "update_weights_from_disk", model_path="/models/2.0", abort_all_requests=True, load_format="auto"
    )
    assert (status, answer["success"]) == (200, True)
    assert serves(ports)
    assert await post(ports, "continue_generation") == (200, CONTINUED)
    assert serves(ports, norm=NORM)
    assert commits(ports) == 1


async def test_tensors_by_name_from_disk(ports: Ports) -> None:
    ports.publish("1.1", embed=EMBED, norm=NORM)
    body = {"model_path": "file:///models/1.1", "weight_name_filter": ["nor*"]}
    assert (await post(ports, "update_weights_from_disk", body))[0] == 200
    assert serves(ports, norm=NORM)


async def test_base64_in_the_place_of_pickles(ports: Ports) -> None:
    entry = base64.b64encode(packed({"norm": NORM})).decode()
    body = {"serialized_named_tensors": [entry, entry], "load_format": None, "flush_cache": True}
    assert (await post(ports, "update_weights_from_tensor", body))[0] == 200
    assert serves(ports, norm=NORM)


async def test_shared_memory_in_the_place_of_handles(ports: Ports) -> None:
    segment = Path("/dev/shm") / f"modelswap-compat-{id(ports)}"
    segment.write_bytes(NORM)
    try:
        tensors = [{"name": "norm", "dtype": "U8", "shape": [2]}]
        status, _ = await post(ports, "update_weights_from_ipc", segment=segment.name, tensors=tensors)
    finally:
        segment.unlink()
    assert status == 200
    assert serves(ports, norm=NORM)


# What is refused, and what it leaves behind.


async def test_pickles_are_refused_with_what_to_send_instead(ports: Ports) -> None:
    entry = base64.b64encode(pickle.dumps({"norm": [1, 2]})).decode()
    for load_format in (None, "flattened_bucket"):
        body = {"serialized_named_tensors": [entry], "load_format": load_format}
        status, answer = await post(ports, "update_weights_from_tensor", body)
        assert (status, answer["success"], answer["error"]["code"]) == (400, False, "UnsupportedFormat")
        assert "safetensors.torch.save" in answer["message"]
    status, answer = await post(ports, "update_weights_from_ipc", zmq_handles={"GPU-0": "ipc:///x"})
    assert (status, answer["success"]) == (400, False)
    assert "segment" in answer["message"]
    assert serves(ports)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("begin_weight_update", {"selector": "draft"}),
        ("update_weights_from_disk", {"model_path": "/models/1.0", "selector": "draft"}),
        ("update_weights_from_distributed", NORM_SENT | {"selector": "draft"}),
        ("weights_checker", {"selector": "draft"}),
    ],
)
async def test_a_draft_model_is_refused_by_name(ports: Ports, route: str, body: dict[str, Any]) -> None:
    status, answer = await post(ports, route, body)
    assert (status, answer["success"], answer["error"]["code"]) == (400, False, "UnsupportedChange")
    assert "draft" in answer["message"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("pause_generation", {"mode": "bogus"}),
        ("update_weights_from_disk", {}),
        ("update_weights_from_disk", {"model_path": "org/name"}),
        ("update_weights_from_disk", {"model_path": "/models/1.0", "load_format": "dummy"}),
        ("update_weights_from_tensor", {"serialized_named_tensors": []}),
        ("update_weights_from_tensor", {"serialized_named_tensors": ["!"]}),
        ("update_weights_from_tensor", {"serialized_named_tensors": ["YQ==", "Yg=="]}),
        ("update_weights_from_tensor", {"serialized_named_tensors": ["YQ=="]}),
        ("update_weights_from_distributed", NORM_SENT | {"dtypes": []}),
        ("update_weights_from_distributed", NORM_SENT | {"dtypes": ["complex64"]}),
        ("update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("update_weights_from_distributed", NORM_SENT),  # no such group
        ("update_weights_from_ipc", {"segment": "x", "tensors": [1]}),
        ("init_weights_update_group", GROUP | {"master_port": "x"}),
        ("init_weights_update_group", GROUP | {"backend": "mpi"}),
        ("init_weights_update_group", GROUP | {"master_address": "8.8.8.8"}),
        ("destroy_weights_update_group", {"group_name": "x"}),
        ("send_weights_to_remote_instance", {"master_address": "127.0.0.1", "ports": "1"}),
        ("weights_checker", {"action": "reset_tensors"}),
        ("weights_checker", {"action": "bogus"}),
        ("get_weights_by_name", {"name": "nothing"}),
        ("save_sharded_model", {"path": "/etc/x"}),
        ("save_remote_model", {"url": "s3://bucket/x"}),
        ("load_lora_adapter", {"lora_name": "a", "lora_path": "/nothing"}),
        ("unload_lora_adapter", {"lora_name": "a"}),
    ],
)
async def test_what_cannot_be_done_is_said_in_their_shape(ports: Ports, route: str, body: dict[str, Any]) -> None:
    status, answer = await post(ports, route, body)
    assert (status, answer["success"]) == (400, False), answer
    assert answer["message"]
    assert answer["error"]["code"]
    assert serves(ports)
    assert ports.coordinator.state().update is None


async def test_a_part_that_fails_ends_the_update(ports: Ports) -> None:
    await post(ports, "pause_generation", {})
    await send(ports, norm=NORM)
    status, answer = await send(ports, embed=b"wrong")
    assert (status, answer["success"]) == (400, False)
    # A trainer that goes on regardless does not make half of its weights live.
    assert (await post(ports, "continue_generation", {}))[0] == 200
    assert serves(ports)
    assert commits(ports) == 0


async def test_a_commit_that_fails_leaves_the_old_weights_and_the_pause(ports: Ports) -> None:
    await post(ports, "pause_generation", {})
    await send(ports, norm=NORM)
    ports.backend.faults["commit"] = Fault.ERROR
    status, answer = await post(ports, "continue_generation", {})
    assert (status, answer["success"]) == (500, False)
    assert serves(ports)
    assert not ports.coordinator.state().gate.open
    assert await post(ports, "continue_generation", {}) == (200, CONTINUED)
    assert ports.coordinator.state().gate.open
    assert serves(ports)


HARMLESS = {
    "sglang": {
        "continue_generation", "destroy_weights_update_group", "init_weights_send_group_for_remote_instance",
        "send_weights_to_remote_instance", "save_sharded_model", "save_remote_model", "weights_checker",
        "check_weights", "get_weights_by_name", "flush_cache",
    },
    "vllm": {"resume", "shutdown_weight_transfer_engine", "reset_prefix_cache", "weight_checker"},
}  # fmt: skip
"""What changes no weights, ends a pause that was begun before, or only costs time."""


async def test_a_managed_pod_refuses_and_an_external_one_does_not(ports: Ports) -> None:
    template = ports.template
    stable = AssignmentTarget(version=template.version, uri=template.uri, digest=template.digest)
    ports.assigned = Assignment(owner_uid="owner-1", epoch=1, revision=1, stable=stable)
    refused = set()
    for method, path in ports.control_routes:
        _, _, dialect, route = (*path.split("/", 3), "", "", "")[:4]
        if method != "POST" or not path.startswith("/compat/") or route in HARMLESS[dialect]:
            continue
        async with ports.control.post(path, json={}) as response:
            assert response.status == 409, path
            assert "WeightsManaged" in await response.text()
        refused.add(route)
    assert len(refused) == 19
    assert ports.coordinator.state().gate.open
    ports.assigned = msgspec.structs.replace(ports.assigned, weights=WeightsPolicy.EXTERNAL)
    assert (await send(ports, norm=NORM))[0] == 200
    assert serves(ports, norm=NORM)


# Looking, and the rest.


async def test_a_new_label_ends_no_request(ports: Ports) -> None:
    status, answer = await post(ports, "update_weight_version", new_version="vX")
    facts = {"success": True, "message": "Weight version updated to vX", "new_version": "vX"}
    assert (status, answer) == (200, facts)
    assert (await get(ports, "model_info"))[1]["weight_version"] == "vX"
    assert commits(ports) == 0
    assert ports.backend.outside.flushes == []


async def test_a_new_label_in_a_pause_comes_with_its_end(ports: Ports) -> None:
    await post(ports, "pause_generation", {})
    _, answer = await post(ports, "update_weight_version", new_version="vX", abort_all_requests=True)
    assert answer["message"] == "Weight version updated to vX when generation continues"
    assert (await get(ports, "model_info"))[1]["weight_version"] == "1.0"
    assert ports.backend.outside.flushes == [RequestPolicy.ABORT] * 2
    await post(ports, "continue_generation", {})
    assert (await get(ports, "model_info"))[1]["weight_version"] == "vX"


async def test_a_request_on_its_way_to_the_engine_is_ended_with_the_others(ports: Ports) -> None:
    async with ports.coordinator.admission() as admission:
        pausing = asyncio.create_task(post(ports, "pause_generation", {}))
        while ports.coordinator.state().gate.open:
            await asyncio.sleep(0)
        assert ports.backend.outside.flushes == []
        admission.submitted()
        while not ports.backend.outside.flushes:
            await asyncio.sleep(0)
        assert not pausing.done()  # it ends when the request, which the engine has ended, has left
    assert await pausing == (200, PAUSED)


async def test_a_pause_that_fails_holds_nobody(ports: Ports) -> None:
    ports.backend.outside.flush_error = Busy("not now")
    status, answer = await post(ports, "pause_generation", {})
    assert (status, answer["success"]) == (409, False)
    assert ports.coordinator.state().gate.lease_id == ""


async def test_what_serves(ports: Ports) -> None:
    status, info = await get(ports, "model_info")
    assert status == 200
    assert (info["model_path"], info["served_model_name"]) == (ports.template.uri, "tiny")
    assert (info["weight_version"], info["weight_digest"]) == ("1.0", ports.template.digest)
    assert (await get(ports, "get_model_info"))[1] == info
    async with ports.control.get(f"{BASE}/health_generate") as response:
        assert response.status == 200


@pytest.mark.parametrize("route", ["weights_checker", "check_weights"])
async def test_checksums(ports: Ports, route: str) -> None:
    status, answer = await post(ports, route, action="checksum")
    assert (status, answer["success"], answer["message"]) == (200, True, "Success.")
    (rank,) = answer["ranks"]
    manifest = FakeCheckpoint({"embed": b"e" * 8, "norm": b"n" * 2}, side=side_files()).manifest()
    assert rank["checksums"] == {entry.name: entry.sha256[:16] for entry in manifest.tensors}
    assert answer["per_engine_checksum"] == manifest.digest.removeprefix("sha256:")
    async with ports.control.get(f"{BASE}/{route}") as response:
        assert (await response.json())["ranks"] == answer["ranks"]
    # A snapshot and a comparison are tools for debugging, which an engine has to be started with.
    assert (await post(ports, route, action="snapshot"))[0] == 400


async def test_checksums_of_every_rank(ports: Ports) -> None:
    """Two ranks of one model, of which one holds other bytes."""
    await ports.grow()
    ports.backend.astray = {1: {"norm": b"??"}}
    status, answer = await post(ports, "weights_checker", action="checksum")
    first, second = answer["ranks"]
    assert (status, answer["message"]) == (400, "changed: norm (rank 1)")
    assert first["checksums"]["norm"] != second["checksums"]["norm"]
    assert first["checksums"]["embed"] == second["checksums"]["embed"]
    assert [rank["parallelism_info"][0]["tp_rank"] for rank in answer["ranks"]] == [0, 1]
    assert second["parallelism_info"] == [{"role": "target", "tp_rank": 1, "tp_size": 2, "dp_rank": 0, "dp_size": 1}]


async def test_the_cache_is_not_flushed_under_running_requests(ports: Ports) -> None:
    ports.backend.requests = 1
    async with ports.control.post(f"{BASE}/flush_cache") as response:
        assert (response.status, await response.text()) == (400, "Flush cache failed.\n")
    await post(ports, "pause_generation", mode="retract")
    async with ports.control.post(f"{BASE}/flush_cache") as response:
        assert response.status == 200
    assert ports.backend.outside.flushes == [RequestPolicy.RECOMPUTE]
    ports.backend.requests = 0


async def test_a_pause_needs_a_mode_that_the_engine_has(ports: Ports) -> None:
    ports.backend.modes = [TrafficMode.DRAIN, TrafficMode.ABORT]
    assert (await post(ports, "pause_generation", mode="in_place"))[0] == 400
    assert ports.coordinator.state().gate.open


async def test_one_tensor_as_numbers(ports: Ports) -> None:
    assert await post(ports, "get_weights_by_name", name="embed", truncate_size=3) == (200, [101.0, 101.0, 101.0])
    assert await get(ports, "get_weights_by_name", name="norm") == (200, [110.0, 110.0])


async def test_another_engine_gets_the_weights(ports: Ports) -> None:
    peer = {"master_address": "127.0.0.1", "ports": "29501,29502", "group_name": "seed"}
    status, answer = await post(
        ports, "init_weights_send_group_for_remote_instance", group_rank=0, world_size=2, backend="gloo", **peer
    )
    assert (status, answer["success"]) == (200, True)
    joined = ports.backend.outside.groups["seed_29501_0"]
    assert (joined.port, joined.rank, joined.size, joined.sends) == (29501, 0, 2, True)
    status, answer = await post(ports, "send_weights_to_remote_instance", **peer)
    assert (status, answer["digest"]) == (200, ports.template.digest)
    assert ports.backend.outside.sent["seed_29501_0"] == ports.backend.live
    assert ports.backend.outside.groups == {}


async def test_saving(ports: Ports, tmp_path: Path) -> None:
    status, answer = await post(ports, "save_sharded_model", path=str(tmp_path / "out" / "a"), max_size=4)
    assert (status, len(answer["files"])) == (200, 2)
    status, _ = await post(ports, "save_remote_model", url=(tmp_path / "out" / "b").as_uri())
    assert status == 200
    for name in ("a", "b"):
        manifest = await asyncio.to_thread(build_manifest, tmp_path / "out" / name)
        assert manifest.digest == ports.template.digest


async def test_adapters(ports: Ports) -> None:
    ports.opener.put("file:///adapters/one", "one")
    status, answer = await post(ports, "load_lora_adapter", lora_name="a", lora_path="/adapters/one", pinned=False)
    facts = {"success": True, "error_message": "", "loaded_adapters": {"a": "file:///adapters/one"}}
    assert (status, answer) == (200, facts)
    status, answer = await post(ports, "unload_lora_adapter", lora_name="a")
    assert (status, answer["loaded_adapters"]) == (200, {})


async def test_no_route_works_without_a_token(ports: Ports) -> None:
    for route in ("pause_generation", "update_weights_from_tensor", "load_lora_adapter", "flush_cache"):
        async with ports.anonymous.post(f"{BASE}/{route}", json={}) as response:
            assert response.status == 401
