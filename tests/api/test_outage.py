"""The API server in trouble in the middle of a rollout: pods go on by themselves, the operator goes on afterwards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.states import SwapState
from tests.api.conftest import CONTENTS, OperatorProcess, granted
from tests.support.apiserver import ApiServer
from tests.support.fake_pods import Slot, eventually, ref
from tests.support.rest import Rest
from tests.support.weak_api import WeakApi

pytestmark = pytest.mark.api

NAMESPACE = "troubled"
V10, V11, V12 = ref("1.0", "a"), ref("1.1", "b"), ref("1.2", "c")


@pytest.fixture
async def api(definitions: ApiServer, rest: Rest, tmp_path: Path) -> AsyncIterator[tuple[WeakApi, OperatorProcess]]:
    """An operator that reaches the API server by a way that can fail."""
    account = granted(definitions, rest, tmp_path, namespace=NAMESPACE)
    kubeconfig = tmp_path / "weak.kubeconfig"
    async with WeakApi(definitions, user=account.user, kubeconfig=kubeconfig) as weak:
        process = OperatorProcess(definitions, tmp_path, account=account)
        process.start(kubeconfig=kubeconfig)
        await asyncio.to_thread(process.wait_ready)
        yield weak, process
        await asyncio.to_thread(process.stop)


@pytest.fixture
async def slot(rest: Rest) -> AsyncIterator[Slot]:
    found = Slot(rest, namespace=NAMESPACE, name="slot", contents=dict(CONTENTS))
    yield found
    await found.close()


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
    for _ in range(3):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)
    for number, (version, code) in enumerate(((V11, "error"), (V12, "429"), (V10, "500")), start=1):
        await rollout_with(weak, operator, slot, version, code)
        assert [len(pod.sidecar.swaps) for pod in slot.pods] == [number] * 3, code
    assert len({swap.fence.epoch for pod in slot.pods for swap in pod.sidecar.swaps}) == 1  # one process, all the time
    assert "Traceback" not in operator.log()


async def rollout_with(weak: WeakApi, operator: OperatorProcess, slot: Slot, version: VersionRef, code: str) -> None:
    """Bring a version to the pods, with the API server in trouble while the first one stages it."""
    first, *others = (pod.sidecar for pod in slot.pods)
    counts = [len(other.swaps) for other in others]
    begun = len(first.swaps)
    first.go.clear()
    first.hold_at = SwapState.STAGED
    slot.bump(version)
    await eventually(lambda: len(first.swaps) > begun, what=slot.story)
    before = requests((await asyncio.to_thread(operator.get, "/metrics"))[1], code)
    await (weak.refuse() if code == "error" else weak.answer_with(int(code)))
    first.go.set()
    await eventually(lambda: first.live == version, what=slot.story)  # a swap that was accepted needs no operator
    await in_trouble(operator, code, before=before)
    assert [len(other.swaps) for other in others] == counts  # nothing is decided on what cannot be read
    assert await asyncio.to_thread(operator.get, "/livez") == (200, "ok")
    await weak.heal()
    await slot.ready_at(version)
