"""Who may decide, and under which epoch.

The epoch is the Lease's ``leaseTransitions``: each process that takes over counts it up, with leader election or
without, so that calls of an older process are refused by the pods (a Lease alone is no fence: a paused process wakes
up believing that it leads). A Lease that somebody deleted starts again from the time, not from 0, because pods
remember the highest epoch they have seen.
"""

import asyncio
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import structlog
from kubernetes.aio.client import ApiClient, V1LeaseSpec
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from modelswap_operator.runtime.settings import Settings

EPOCH_ORIGIN = datetime(2024, 1, 1, tzinfo=UTC)

_log = structlog.get_logger(__name__)


def first_epoch(now: datetime) -> int:
    """Return the epoch of a Lease that did not exist: seconds since 2024, above any count kept before."""
    return max(1, int((now - EPOCH_ORIGIN).total_seconds()))


class FencedLeaseLock(LeaseLock):
    """The official lock, which leaves ``leaseTransitions`` alone; this one counts each change of holder."""

    def __init__(self, settings: Settings, api_client: ApiClient, *, now: Callable[[], datetime]) -> None:
        # A process is another holder than its predecessor in the same pod: it must get an epoch of its own.
        identity = f"{settings.pod_name}_{secrets.token_hex(4)}"
        super().__init__(settings.lease_name, settings.pod_namespace, identity, api_client)
        self.epoch = 0
        self._now = now
        self._wanted = 0

    def update_lease(
        self, leader_election_record: LeaderElectionRecord, current_spec: V1LeaseSpec | None = None
    ) -> Any:
        """Return the spec to write, with the holder's change counted."""
        holder = current_spec.holder_identity if current_spec is not None else None
        count = current_spec.lease_transitions if current_spec is not None else None
        spec = super().update_lease(leader_election_record, current_spec)
        if not count:
            spec.lease_transitions = first_epoch(self._now())
        elif holder != leader_election_record.holder_identity:
            spec.lease_transitions = count + 1
        self._wanted = int(spec.lease_transitions)
        return spec

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        """Create the Lease; the epoch is ours when that succeeds."""
        return self._took(await super().create(name, namespace, election_record))

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Update the Lease (compare-and-swap); the epoch is ours when that succeeds."""
        return self._took(await super().update(name, namespace, updated_record))

    def _took(self, succeeded: bool) -> bool:
        if succeeded:
            self.epoch = self._wanted
        return succeeded

    async def release(self) -> None:
        """Give the Lease up, so that the next process need not wait for it to expire."""
        found, _ = await self.get(self.name, self.namespace)
        lease = self.lease_reference
        if not found or lease is None or lease.spec is None or lease.spec.holder_identity != self.identity:
            return
        lease.spec.holder_identity = None
        try:
            await self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease)
        except ApiException as error:
            _log.warning("lease not released", lease=self.name, error=str(error.reason))


async def claim_epoch(lock: FencedLeaseLock, settings: Settings) -> None:
    """Without leader election: count the epoch up once, whoever held the Lease before."""
    while True:
        stamp = str(datetime.now(UTC).replace(tzinfo=None, microsecond=1))
        record = LeaderElectionRecord(lock.identity, str(settings.lease_seconds), stamp, stamp)
        found, answer = await lock.get(lock.name, lock.namespace)
        if found:
            done = await lock.update(lock.name, lock.namespace, record)
        else:
            missing = isinstance(answer, ApiException) and answer.status == 404
            done = missing and await lock.create(lock.name, lock.namespace, record)
        if done:
            return
        _log.warning("lease not written, trying again", lease=f"{lock.namespace}/{lock.name}")
        await asyncio.sleep(settings.retry_seconds)


def election(lock: FencedLeaseLock, settings: Settings, *, elected: asyncio.Event) -> LeaderElection:
    """Return the official election; ``elected`` is set once it is won, and its ``run`` ends when it is lost."""

    async def won() -> None:
        elected.set()

    async def lost() -> None:
        _log.error("lease lost", lease=f"{lock.namespace}/{lock.name}")

    return LeaderElection(
        Config(
            lock,
            lease_duration=settings.lease_seconds,
            renew_deadline=settings.renew_seconds,
            retry_period=settings.retry_seconds,
            onstarted_leading=won,
            onstopped_leading=lost,
        )
    )
