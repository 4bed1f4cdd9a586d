"""The API server in trouble in the middle of a rollout: pods go on by themselves, the operator goes on afterwards."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_operator.runtime.app import EXIT_LEASE_LOST
from tests.api.conftest import CONTENTS
from tests.support.apiserver import ApiServer
from tests.support.custom import GROUP_VERSION, install_definitions
from tests.support.fake_pods import Slot, eventually, ref
from tests.support.operated import Account, OperatorProcess, granted
from tests.support.rest import Rest
from tests.support.weak_api import WeakApi

pytestmark = pytest.mark.api

NAMESPACE = "troubled"
_numbers = itertools.count(1)
V10, V11, V12 = ref("1.0", "a"), ref("1.1", "b"), ref("1.2", "c")


@pytest.fixture(scope="module")
def account(definitions: ApiServer, rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> Account:
    return granted(definitions, rest, tmp_path_factory.mktemp("account"), namespace=NAMESPACE)


@pytest.fixture
async def api(
    definitions: ApiServer, account: Account, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[WeakApi, OperatorProcess]]:
    """An operator that reaches the API server by a way that can fail."""
    async with WeakApi(definitions, user=account.user, kubeconfig=tmp_path / "weak.kubeconfig") as weak:
        process = OperatorProcess(definitions, tmp_path, account=account)
        process.start(*getattr(request, "param", ()), kubeconfig=weak.kubeconfig)
        await asyncio.to_thread(process.wait_ready)
        yield weak, process
        await asyncio.to_thread(process.stop)


@pytest.fixture
async def slot(rest: Rest) -> AsyncIterator[Slot]:
    """A slot with three pods that serve 1.0, as its ModelVersion says."""
    found = Slot(rest, namespace=NAMESPACE, name=f"slot-{next(_numbers)}", contents=dict(CONTENTS))
    for _ in range(3):
        await found.add_pod(V10)
    found.create(V10)
    yield found
    await found.remove()


def requests(page: str, code: str) -> int:
    """Return how many requests to the API server ended with a code, as the operator's metrics say."""
    found = re.findall(rf'modelswap_rest_client_requests_total\{{code="{code}",method="\w+"\}} (\d+)', page)
    return sum(map(int, found))


async def in_trouble(operator: OperatorProcess, code: str, *, before: int, times: int = 3) -> None:
    """Wait until the operator has met the trouble so often."""

    async def met() -> int:
        status, page = await asyncio.to_thread(operator.get, "/metrics")
        return requests(page, code) - before if status == 200 else 0

    while await met() < times:
        operator.child.check()
        await asyncio.sleep(0.1)


async def test_trouble_in_the_middle_of_a_rollout_costs_time_and_nothing_else(
    api: tuple[WeakApi, OperatorProcess], slot: Slot
) -> None:
    weak, operator = api
    await slot.ready_at(V10)
    for number, (version, code) in enumerate(((V11, "error"), (V12, "429"), (V10, "500")), start=1):
        await rollout_with(weak, operator, slot, version, code)
        assert [len(pod.sidecar.swaps) for pod in slot.pods] == [number] * 3, code
    assert len({swap.fence.epoch for pod in slot.pods for swap in pod.sidecar.swaps}) == 1  # one process, all the time
    assert "Traceback" not in operator.log()


async def first_stages(slot: Slot, version: VersionRef) -> None:
    """Ask for a version, and return when the first pod has begun; it does not go on before it is told to."""
    first = slot.pods[0].sidecar
    begun = len(first.swaps)
    first.go.clear()
    first.hold_at = SwapState.STAGED
    slot.bump(version)
    await eventually(lambda: len(first.swaps) > begun, what=slot.story)


async def rollout_with(weak: WeakApi, operator: OperatorProcess, slot: Slot, version: VersionRef, code: str) -> None:
    """Bring a version to the pods, with the API server in trouble while the first one stages it."""
    first, *others = (pod.sidecar for pod in slot.pods)
    counts = [len(other.swaps) for other in others]
    await first_stages(slot, version)
    before = requests((await asyncio.to_thread(operator.get, "/metrics"))[1], code)
    await (weak.refuse() if code == "error" else weak.answer_with(int(code)))
    first.go.set()
    await eventually(lambda: first.live == version, what=slot.story)  # a swap that was accepted needs no operator
    await in_trouble(operator, code, before=before)
    assert [len(other.swaps) for other in others] == counts  # nothing is decided on what cannot be read
    assert await asyncio.to_thread(operator.get, "/livez") == (200, "ok")
    await weak.heal()
    await slot.ready_at(version)


ELECTED = ("--leader-elect", "--lease-seconds=6", "--renew-seconds=4", "--retry-seconds=1")


@pytest.mark.parametrize("api", [ELECTED], indirect=True, ids=["elected"])
async def test_a_leader_that_cannot_renew_ends_and_the_next_one_goes_on(
    api: tuple[WeakApi, OperatorProcess], slot: Slot
) -> None:
    weak, operator = api
    await slot.ready_at(V10)
    await first_stages(slot, V11)
    await weak.refuse()
    while operator.child.status is None:
        await asyncio.sleep(0.1)
    assert operator.child.status == EXIT_LEASE_LOST, operator.child.tail()
    slot.pods[0].sidecar.go.set()
    await weak.heal()
    operator.start(*ELECTED, kubeconfig=weak.kubeconfig)  # as the kubelet does
    await slot.ready_at(V11)
    assert [len(pod.sidecar.swaps) for pod in slot.pods] == [1, 1, 1]
    before, *after = (pod.sidecar.swaps[0].fence.epoch for pod in slot.pods)
    assert set(after) == {before + 1}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [25, pytest.param(95, marks=pytest.mark.full)])
async def test_an_api_server_that_is_away_for_long_costs_no_more_than_that(
    api: tuple[WeakApi, OperatorProcess], slot: Slot, rest: Rest, seconds: int
) -> None:
    weak, operator = api
    await slot.ready_at(V10)
    await first_stages(slot, V11)
    await weak.refuse()
    slot.pods[0].sidecar.go.set()
    for _ in range(seconds):  # the length is what is tried
        await asyncio.sleep(1)
        assert await asyncio.to_thread(operator.get, "/livez") == (200, "ok")
    rest.reconnect()  # the server has let go of a connection on which nothing was said
    await weak.heal()
    await slot.ready_at(V11)
    assert [len(pod.sidecar.swaps) for pod in slot.pods] == [1, 1, 1]


async def test_a_history_that_is_compacted_away_is_listed_anew(own_api_server: ApiServer, tmp_path: Path) -> None:
    """The operator's watches come back with a place in history that the API server has no more."""
    server = own_api_server
    install_definitions(server)
    rest = Rest(server)
    account = granted(server, rest, tmp_path, namespace=NAMESPACE)
    async with WeakApi(server, user=account.user, kubeconfig=tmp_path / "weak.kubeconfig") as weak:
        operator = OperatorProcess(server, tmp_path, account=account)
        operator.start(kubeconfig=weak.kubeconfig)
        slot = Slot(rest, namespace=NAMESPACE, name="slot", contents=dict(CONTENTS))
        try:
            await slot.add_pod(V10)
            slot.create(V10)
            await slot.ready_at(V10)
            place = slot.object()["metadata"]["resourceVersion"]
            await weak.refuse()
            slot.bump(V11)
            await asyncio.to_thread(compacted, server)
            assert await asyncio.to_thread(watched_from, server, place) == 410
            rest.reconnect()
            await weak.heal()
            await slot.ready_at(V11)
            assert len(slot.pods[0].sidecar.swaps) == 1
            slot.bump(V12)  # what is watched again is heard of at once
            await slot.ready_at(V12)
        finally:
            await asyncio.to_thread(operator.stop)
            await slot.close()


def compacted(server: ApiServer) -> None:
    """Have etcd forget all that was, and the API server too."""
    server.stop_apiserver()
    here = etcd(server, "kv/range", {"key": base64.b64encode(b"x").decode()})
    etcd(server, "kv/compaction", {"revision": here["header"]["revision"], "physical": True})
    server.start_apiserver()


def etcd(server: ApiServer, call: str, body: dict[str, object]) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.etcd_url}/v3/{call}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def watched_from(server: ApiServer, place: str) -> int:
    """Return the status with which a watch from that place ends; 0 when it does not."""
    path = (
        f"/apis/{GROUP_VERSION}/namespaces/{NAMESPACE}/modelversions?watch=1&timeoutSeconds=2&resourceVersion={place}"
    )
    told = server.try_kubectl("get", "--raw", path)
    return 410 if '"code":410' in told.stdout or "too old resource version" in told.stderr else 0


@pytest.mark.full  # it takes the longest silence that is allowed
@pytest.mark.timeout(600)
async def test_connections_that_carry_nothing_any_more_are_given_up(
    api: tuple[WeakApi, OperatorProcess], slot: Slot
) -> None:
    weak, operator = api
    await slot.ready_at(V10)
    weak.freeze()
    slot.bump(V11)
    await eventually(lambda: slot.condition("Ready") == ("True", "Succeeded"), what=slot.story, seconds=240)
    assert slot.serving() == ["1.1"] * 3
    slot.bump(V12)  # and what is watched again is heard of at once
    await slot.ready_at(V12)
    assert await asyncio.to_thread(operator.get, "/livez") == (200, "ok")
