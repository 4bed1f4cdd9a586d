"""vLLM's control routes where they mean the same here: answers and errors in vLLM's shape."""

from typing import Any

import pytest

from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.policy import TrafficMode
from tests.contract.ports.test_sglang_port import NORM, commits, serves
from tests.support.ports import Ports

BASE = "/compat/vllm"
INIT = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
NORM_SENT = {"names": ["norm"], "dtype_names": ["uint8"], "shapes": [[2]]}


async def post(ports: Ports, route: str, body: Any = None, **query: str) -> tuple[int, Any]:
    async with ports.control.post(f"{BASE}/{route}", json=body, params=query) as response:
        return response.status, await response.json()


async def get(ports: Ports, route: str) -> Any:
    async with ports.control.get(f"{BASE}/{route}") as response:
        assert response.status == 200
        return await response.json()


async def test_a_whole_update(ports: Ports) -> None:
    assert await post(ports, "init_weight_transfer_engine", {"init_info": INIT}) == (
        200,
        {"message": "Weight transfer initialized"},
    )
    assert await post(ports, "pause", mode="keep") == (200, {"status": "paused"})
    assert await get(ports, "is_paused") == {"is_paused": True}
    assert await post(ports, "start_weight_update") == (200, {"message": "Weight update started"})
    ports.backend.outside.coming = {"norm": NORM}
    assert await post(ports, "update_weights", {"update_info": NORM_SENT}) == (200, {"message": "Weights updated"})
    assert await post(ports, "update_weights", {"update_info": [NORM_SENT, NORM_SENT]}) == (
        200,
        {"message": "Weights updated"},
    )
    assert serves(ports)
    assert await post(ports, "finish_weight_update", {"weight_version": "B-1"}) == (
        200,
        {"message": "Weight update finished"},
    )
    assert serves(ports, norm=NORM)
    assert commits(ports) == 1
    assert ports.backend.policies == [RequestPolicy.RECOMPUTE]
    assert await get(ports, "weight_info") == {"weight_version": "B-1"}
    assert await post(ports, "resume") == (200, {"status": "resumed"})
    assert await get(ports, "is_paused") == {"is_paused": False}
    assert await post(ports, "shutdown_weight_transfer_engine") == (200, {"message": "Weight transfer shut down"})
    assert (await post(ports, "shutdown_weight_transfer_engine"))[0] == 404


async def test_a_checkpoint_from_disk(ports: Ports) -> None:
    ports.publish("1.1", norm=NORM)
    assert (await post(ports, "update_weights", {"update_info": {"path": "/models/1.1"}}))[0] == 200
    assert serves(ports, norm=NORM)


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("start_draft_weight_update", None, 422),
        ("update_weights", {"update_info": NORM_SENT | {"packed": True}}, 422),
        ("update_weights", {"update_info": {}}, 400),
        ("update_weights", {"update_info": [NORM_SENT, {"path": "/x"}]}, 400),
        ("update_weights", {"update_info": NORM_SENT}, 404),
        ("update_weights", {}, 400),
        ("finish_weight_update", {}, 400),
        ("weight_checker", {"action": "reset"}, 422),
        ("init_weight_transfer_engine", {}, 400),
        ("init_weight_transfer_engine", {"init_info": INIT | {"master_address": "8.8.8.8"}}, 422),
        ("v1/unload_lora_adapter", {"lora_name": "zzz"}, 404),
    ],
)
async def test_errors_have_their_shape(ports: Ports, route: str, body: Any, status: int) -> None:
    answered, answer = await post(ports, route, body)
    assert answered == status, answer
    error = answer["error"]
    assert (error["code"], error["param"]) == (status, None)
    assert error["message"]
    assert error["modelswap"]["code"] == error["type"]
    assert serves(ports)
    assert ports.coordinator.state().update is None


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ({}, TrafficMode.ABORT),
        ({"mode": "wait"}, TrafficMode.DRAIN),
        ({"mode": "keep"}, TrafficMode.RECOMPUTE),
        ({"mode": "keep", "clear_cache": "false"}, TrafficMode.FREEZE),
    ],
)
async def test_what_a_pause_means_for_those_in_flight(ports: Ports, query: dict[str, str], mode: TrafficMode) -> None:
    policies = {
        TrafficMode.ABORT: RequestPolicy.ABORT,
        TrafficMode.DRAIN: RequestPolicy.NONE_RUNNING,
        TrafficMode.RECOMPUTE: RequestPolicy.RECOMPUTE,
        TrafficMode.FREEZE: RequestPolicy.FREEZE,
    }
    ports.publish("1.1", norm=NORM)
    assert (await post(ports, "pause", **query))[0] == 200
    assert (await post(ports, "pause", **query))[0] == 200  # again changes nothing
    assert (await post(ports, "update_weights", {"update_info": {"path": "/models/1.1"}}))[0] == 200
    assert serves(ports)
    assert (await post(ports, "resume"))[0] == 200
    assert serves(ports, norm=NORM)
    assert ports.backend.policies == [policies[mode]]
    assert (await post(ports, "pause", mode="bogus"))[0] == 400


async def test_the_rest(ports: Ports) -> None:
    assert await post(ports, "reset_prefix_cache") == (200, {"success": True})
    ports.backend.requests = 1
    assert await post(ports, "reset_prefix_cache") == (200, {"success": False})
    ports.backend.requests = 0
    assert await get(ports, "get_world_size") == {"world_size": 1}
    assert await post(ports, "update_weight_version", {"new_version": "v7"}) == (
        200,
        {"success": True, "new_version": "v7"},
    )
    assert await get(ports, "weight_info") == {"weight_version": "v7"}
    _, sums = await post(ports, "weight_checker", {"action": "checksum"})
    assert set(sums["checksums"]) == {"dp0:pp0:pcp0:tp0:embed", "dp0:pp0:pcp0:tp0:norm"}
    baseline = sums["checksums"]
    assert (await post(ports, "weight_checker", {"action": "compare", "baseline": baseline}))[1]["match"] is True
    wrong = baseline | {"dp0:pp0:pcp0:tp0:norm": "0"}
    assert (await post(ports, "weight_checker", {"action": "compare", "baseline": wrong}))[1] == {
        "match": False,
        "mismatches": ["dp0:pp0:pcp0:tp0:norm"],
    }


async def test_checksums_of_every_replica(ports: Ports) -> None:
    await ports.grow(replicas=True)
    _, sums = await post(ports, "weight_checker", {"action": "checksum"})
    assert set(sums["checksums"]) == {f"dp{rank}:pp0:pcp0:tp0:{name}" for rank in (0, 1) for name in ("embed", "norm")}
    ports.backend.astray = {1: {"norm": b"??"}}
    _, compared = await post(ports, "weight_checker", {"action": "compare", "baseline": sums["checksums"]})
    assert compared == {"match": False, "mismatches": ["dp1:pp0:pcp0:tp0:norm"]}


async def test_adapters(ports: Ports) -> None:
    ports.opener.put("file:///adapters/one", "one")
    body = {"lora_name": "ad1", "lora_path": "/adapters/one", "load_inplace": False}
    async with ports.control.post(f"{BASE}/v1/load_lora_adapter", json=body) as response:
        assert response.status == 200
        assert await response.text() == "Success: LoRA adapter 'ad1' added successfully."
    async with ports.control.post(f"{BASE}/v1/unload_lora_adapter", json={"lora_name": "ad1"}) as response:
        assert await response.text() == "Success: LoRA adapter 'ad1' removed successfully."


async def test_no_route_works_without_a_token(ports: Ports) -> None:
    async with ports.anonymous.post(f"{BASE}/pause") as response:
        assert response.status == 401
