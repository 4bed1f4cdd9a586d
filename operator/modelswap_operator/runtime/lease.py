"""The Lease behind the leader election, and the fencing epoch that it keeps.

The epoch is ``leaseTransitions``: each process that takes the Lease counts it up, so that calls of an older process
are refused by the pods (a Lease alone is no fence: a paused process wakes up believing that it leads). A Lease that
somebody deleted starts again from the time, not from 0, because pods remember the highest epoch they have seen.

A lock of our own for the official election: the official one neither counts transitions nor can create a Lease
(kubernetes 37.0.2 passes ``pretty=True`` where its own check wants a string).
"""

import json
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import structlog
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.baselock import BaseLock

from modelswap_operator.effects import paths
from modelswap_operator.effects.kube import ApiError, Json, Kube

EPOCH_ORIGIN = datetime(2024, 1, 1, tzinfo=UTC)
EPOCH_LIMIT = 2**31 - 1
"""``leaseTransitions`` is an int32."""
NOT_FOUND = 404

_log = structlog.get_logger(__name__)


def first_epoch(now: datetime) -> int:
    """Return the epoch of a Lease that did not exist: seconds since 2024, above any count kept before."""
    return max(1, int((now - EPOCH_ORIGIN).total_seconds()))


class FencedLease(BaseLock):
    """One candidate's view of the Lease; ``epoch`` is its own once it holds the Lease."""

    def __init__(self, kube: Kube, *, namespace: str, name: str, pod: str, now: Callable[[], datetime]) -> None:
        # A process is another holder than its predecessor in the same pod: it must get an epoch of its own.
        super().__init__(name, namespace, f"{pod}_{secrets.token_hex(4)}")
        self.epoch = 0
        self._kube = kube
        self._now = now
        self._seen: Json = {}

    async def get(
        self, name: str, namespace: str
    ) -> tuple[bool, LeaderElectionRecord] | tuple[bool, Exception] | tuple[bool, None]:
        """Read the Lease; an absent one is told as the election wants it told."""
        try:
            found = await self._kube.get(paths.leases(namespace, name))
        except ApiError as error:
            return False, _exception(error.status, error.message)
        if found is None:
            return False, _exception(NOT_FOUND, "no such lease")
        self._seen = found
        return True, _record(found.get("spec") or {})

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        """Make the Lease; False when somebody else was faster or the API server cannot be asked."""
        epoch = first_epoch(self._now())
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": namespace},
            "spec": _spec(election_record, epoch),
        }
        return await self._write(self._kube.create(paths.leases(namespace), body), epoch)

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Take or renew the Lease that was read last, if it is still the same (compare-and-swap)."""
        before = self._seen.get("spec") or {}
        count = int(before.get("leaseTransitions") or 0)
        if not count:
            epoch = first_epoch(self._now())
        else:
            epoch = count + (before.get("holderIdentity") != updated_record.holder_identity)
        body = {**self._seen, "spec": {**before, **_spec(updated_record, epoch)}}
        return await self._write(self._kube.replace(paths.leases(namespace, name), body), epoch)

    async def outbid(self, seen: int) -> bool:
        """Claim an epoch above one that was seen elsewhere; False when this process does not hold the Lease.

        The holder of the Lease is the youngest leader, so a higher epoch in an assignment or a pod is no successor's:
        it was restored from a backup or written by hand, and would keep every leader from deciding.
        """
        try:
            found = await self._kube.get(paths.leases(self.namespace, self.name)) or {}
        except ApiError as error:
            _log.warning("lease not read", error=str(error))
            return False
        spec = found.get("spec") or {}
        if spec.get("holderIdentity") != self.identity:
            return False
        if seen < self.epoch:
            return True
        if seen >= EPOCH_LIMIT:
            _log.error("the epoch seen leaves no higher one: delete the assignment ConfigMap, then the pods", seen=seen)
            return False
        body = {**found, "spec": {**spec, "leaseTransitions": seen + 1}}
        return await self._write(self._kube.replace(paths.leases(self.namespace, self.name), body), seen + 1)

    async def release(self) -> None:
        """Give the Lease up, so that the next process need not wait for it to expire."""
        held, _ = await self.get(self.name, self.namespace)
        spec = self._seen.get("spec") or {}
        if not held or spec.get("holderIdentity") != self.identity:
            return
        body = {**self._seen, "spec": {k: v for k, v in spec.items() if k != "holderIdentity"}}
        try:
            await self._kube.replace(paths.leases(self.namespace, self.name), body)
        except ApiError as error:
            _log.warning("lease not released", error=str(error))

    async def _write(self, call: Any, epoch: int) -> bool:
        try:
            self._seen = await call
        except ApiError as error:
            _log.warning("lease not written", error=str(error))
            return False
        self.epoch = epoch
        return True


def record(identity: str, *, seconds: int, now: datetime) -> LeaderElectionRecord:
    """Return a holder's record as the election makes it."""
    moment = str(now.astimezone(UTC).replace(tzinfo=None))
    return LeaderElectionRecord(identity, str(seconds), moment, moment)


def _spec(wanted: LeaderElectionRecord, epoch: int) -> Json:
    return {
        "holderIdentity": wanted.holder_identity,
        "leaseDurationSeconds": int(float(wanted.lease_duration or 0)),
        "acquireTime": _to_api(wanted.acquire_time),
        "renewTime": _to_api(wanted.renew_time),
        "leaseTransitions": epoch,
    }


def _record(spec: Json) -> LeaderElectionRecord:
    seconds = spec.get("leaseDurationSeconds")
    return LeaderElectionRecord(
        spec.get("holderIdentity") or None,
        str(seconds) if seconds else None,
        spec.get("acquireTime"),
        spec.get("renewTime"),
    )


def _to_api(moment: str | None) -> str:
    """Return the API's form of a time: the election hands back what it read, and makes new ones without a zone."""
    if moment is None:
        raise ValueError("a lease record without a time")
    if moment.endswith("Z"):
        return moment
    return datetime.fromisoformat(moment).isoformat(timespec="microseconds") + "Z"


def _exception(status: int, message: str) -> ApiException:
    return ApiException(status=status, reason=message, body=json.dumps({"code": status, "message": message}))
