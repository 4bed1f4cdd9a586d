"""The epoch only ever rises: over takeovers, lost races, renewals and a deleted Lease."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from modelswap_operator.effects.kube import ApiConflict, ApiUnavailable
from modelswap_operator.runtime.election import claim_epoch
from modelswap_operator.runtime.lease import EPOCH_LIMIT, FencedLease, first_epoch, record
from modelswap_operator.runtime.settings import Settings

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
SETTINGS = Settings(retry_seconds=0.0)


class OneLease:
    """The part of the API server that holds one Lease, with compare-and-swap by resourceVersion."""

    def __init__(self) -> None:
        self.held: dict[str, Any] | None = None
        self.version = 0
        self.down = 0

    async def get(self, path: str) -> dict[str, Any] | None:
        if self.down:
            self.down -= 1
            raise ApiUnavailable(verb="get", path=path, status=0, message="no connection")
        return self.held

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.held is not None:
            raise ApiConflict(verb="post", path=path, status=409, message="exists")
        return self._store(body)

    async def replace(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.held is None or body["metadata"]["resourceVersion"] != self.held["metadata"]["resourceVersion"]:
            raise ApiConflict(verb="put", path=path, status=409, message="changed")
        return self._store(body)

    def _store(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.held = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return self.held


def lease(server: OneLease, *, now: datetime = NOW) -> FencedLease:
    return FencedLease(server, namespace="ns", name="operator", pod="operator-0", now=lambda: now)  # type: ignore[arg-type]


async def claim(server: OneLease, *, now: datetime = NOW) -> int:
    found = lease(server, now=now)
    await claim_epoch(found, SETTINGS, now=lambda: now)
    return found.epoch


async def test_each_process_counts_up_by_one() -> None:
    server = OneLease()
    assert [await claim(server) for _ in range(3)] == [first_epoch(NOW) + n for n in range(3)]


async def test_a_deleted_lease_starts_above_what_was_counted() -> None:
    server = OneLease()
    before = max([await claim(server) for _ in range(5)])
    server.held = None
    assert await claim(server, now=NOW + timedelta(hours=1)) > before


async def test_renewing_does_not_count() -> None:
    server = OneLease()
    mine = lease(server)
    wanted = record(mine.identity, seconds=15, now=NOW)
    assert await mine.create("operator", "ns", wanted)
    first = mine.epoch
    for _ in range(3):
        assert (await mine.get("operator", "ns"))[0]
        assert await mine.update("operator", "ns", wanted)
    assert mine.epoch == first


async def test_of_two_at_once_only_one_gets_the_next_epoch() -> None:
    server = OneLease()
    await claim(server)
    first, second = lease(server), lease(server)
    for each in (first, second):
        await each.get("operator", "ns")
    won = [await each.update("operator", "ns", record(each.identity, seconds=15, now=NOW)) for each in (first, second)]
    assert won == [True, False]
    assert second.epoch == 0


async def test_an_outage_is_waited_for() -> None:
    server = OneLease()
    server.down = 3
    assert await claim(server) == first_epoch(NOW)


async def test_a_released_lease_is_free_at_once_and_still_counts() -> None:
    server = OneLease()
    mine = lease(server)
    await claim_epoch(mine, SETTINGS, now=lambda: NOW)
    await mine.release()
    assert server.held is not None
    assert "holderIdentity" not in server.held["spec"]
    held, found = await lease(server).get("operator", "ns")
    assert held
    assert getattr(found, "holder_identity", "") is None
    assert await claim(server) == mine.epoch + 1


@pytest.mark.parametrize("moment", ["2026-11-29 12:00:00", "2026-11-29 12:00:00.5", "2026-11-29T12:00:00.000000Z"])
async def test_times_of_the_election_reach_the_api_in_its_form(moment: str) -> None:
    server = OneLease()
    mine = lease(server)
    wanted = record(mine.identity, seconds=15, now=NOW)
    wanted.renew_time = moment
    assert await mine.create("operator", "ns", wanted)
    assert server.held is not None
    text = server.held["spec"]["renewTime"]
    assert datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").year == 2026  # noqa: DTZ007


async def test_the_holder_claims_an_epoch_above_one_that_was_forged() -> None:
    server = OneLease()
    mine = lease(server)
    await claim_epoch(mine, SETTINGS, now=lambda: NOW)
    forged = mine.epoch + 1000
    assert await mine.outbid(forged)
    assert mine.epoch == forged + 1
    assert await claim(server) == forged + 2


async def test_one_that_does_not_hold_the_lease_outbids_nobody() -> None:
    server = OneLease()
    mine = lease(server)
    await claim_epoch(mine, SETTINGS, now=lambda: NOW)
    before = mine.epoch
    newer = await claim(server)
    assert not await mine.outbid(newer)
    assert mine.epoch == before


async def test_above_the_highest_epoch_there_is_none() -> None:
    server = OneLease()
    mine = lease(server)
    await claim_epoch(mine, SETTINGS, now=lambda: NOW)
    assert not await mine.outbid(EPOCH_LIMIT)
