"""A cluster-wide operator beside one of the namespace: the object says which of them may act."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelswap_operator.api.labels import OPERATOR
from tests.support.apiserver import ApiServer
from tests.support.fake_pods import Slot, eventually, ref
from tests.support.operated import Account, OperatorProcess, granted
from tests.support.rest import Rest

pytestmark = pytest.mark.api

V10, V11, V12 = ref("1.0", "a"), ref("1.1", "b"), ref("1.2", "c")


@pytest.fixture(scope="module")
def account(definitions: ApiServer, rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> Account:
    home = tmp_path_factory.mktemp("everywhere")
    return granted(definitions, rest, home, namespace="modelswap-everywhere", all_namespaces=True)


@pytest.fixture
async def everywhere(definitions: ApiServer, account: Account, tmp_path: Path) -> AsyncIterator[OperatorProcess]:
    """An operator with a Lease of its own that watches every namespace."""
    process = OperatorProcess(definitions, tmp_path, account=account)
    process.start("--all-namespaces")
    await asyncio.to_thread(process.wait_ready)
    yield process
    await asyncio.to_thread(process.stop)


async def test_each_leaves_alone_what_is_the_others(
    slot: Slot, operator: OperatorProcess, everywhere: OperatorProcess
) -> None:
    theirs, ours = everywhere.identity, operator.identity
    await slot.add_pod(V10)
    slot.create(V10)
    slot.mark(annotations={OPERATOR: theirs})
    await slot.ready_at(V10)
    slot.bump(V11)
    await slot.ready_at(V11)
    assert slot.object()["status"]["operator"] == theirs
    slot.mark(annotations={OPERATOR: ours})
    slot.bump(V12)
    await slot.ready_at(V12)
    assert slot.object()["status"]["operator"] == ours
    assert "OperatorChanged" in [reason for reason, _ in slot.events()]
    assert len(slot.pods[0].sidecar.swaps) == 2, "each change was one operator's"
    assert everywhere.get("/livez") == (200, "ok")


async def looked_at(slot: Slot, *, times: int) -> None:
    """Wait until each pod was asked so often again."""
    before = [len(pod.sidecar.calls) for pod in slot.pods]
    await eventually(
        lambda: all(len(p.sidecar.calls) >= count + times for p, count in zip(slot.pods, before, strict=True))
    )


async def test_two_that_both_may_do_no_harm_and_come_to_rest(
    slot: Slot, operator: OperatorProcess, everywhere: OperatorProcess
) -> None:
    for _ in range(3):
        await slot.add_pod(V10)
    slot.create(V10)
    await slot.ready_at(V10)
    slot.bump(V11)
    await slot.ready_at(V11)
    assert slot.serving() == ["1.1"] * 3
    written, before = [], ""
    while (now := slot.object()["metadata"]["resourceVersion"]) != before:
        written, before = [*written, now], now
        assert len(written) < 10, f"they do not come to rest: {written}\n{slot.story()}"
        await looked_at(slot, times=4)  # two resyncs of both
    assert "Traceback" not in operator.log() + everywhere.log()
