"""Becoming the one process that decides: by leader election, or by taking the Lease's next epoch outright."""

import asyncio
from collections.abc import Callable
from datetime import datetime

import structlog
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection

from modelswap_operator.runtime.lease import NOT_FOUND, FencedLease, record
from modelswap_operator.runtime.settings import Settings

_log = structlog.get_logger(__name__)


async def claim_epoch(lease: FencedLease, settings: Settings, *, now: Callable[[], datetime]) -> None:
    """Without leader election: count the epoch up once, whoever held the Lease before."""
    while True:
        wanted = record(lease.identity, seconds=settings.lease_seconds, now=now())
        found, answer = await lease.get(lease.name, lease.namespace)
        if found:
            done = await lease.update(lease.name, lease.namespace, wanted)
        else:
            missing = isinstance(answer, ApiException) and answer.status == NOT_FOUND
            done = missing and await lease.create(lease.name, lease.namespace, wanted)
        if done:
            return
        _log.warning("no epoch yet, trying again", lease=f"{lease.namespace}/{lease.name}", error=str(answer))
        await asyncio.sleep(settings.retry_seconds)


def election(lease: FencedLease, settings: Settings, *, elected: asyncio.Event) -> LeaderElection:
    """Return the official election; ``elected`` is set once it is won, and its ``run`` ends when it is lost."""

    async def won() -> None:
        elected.set()

    async def lost() -> None:
        _log.error("lease lost", lease=f"{lease.namespace}/{lease.name}")

    return LeaderElection(
        Config(
            lease,
            lease_duration=settings.lease_seconds,
            renew_deadline=settings.renew_seconds,
            retry_period=settings.retry_seconds,
            onstarted_leading=won,
            onstopped_leading=lost,
        )
    )
