"""Events (events.k8s.io/v1), deduplicated by object, reason and text.

The same thing said again within the hour that an Event lives raises the count of its series instead. Losing an Event
is never an error: whatever a person must act on is in status too.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import structlog

from modelswap_operator.api.labels import API_VERSION, REPORTING_CONTROLLER
from modelswap_operator.effects import paths
from modelswap_operator.effects.kube import ApiConflict, ApiError, Kube
from modelswap_operator.status.events import Note

NOTE_BYTES = 1000
REPEAT = timedelta(minutes=5)
REMEMBERED = 2048

_log = structlog.get_logger(__name__)


class EventWriter:
    """Writes Events about our objects."""

    def __init__(self, kube: Kube, *, instance: str, now: Callable[[], datetime]) -> None:
        self._kube = kube
        self._instance = instance
        self._now = now
        self._told: OrderedDict[str, tuple[datetime, int]] = OrderedDict()

    async def write(self, *, kind: str, namespace: str, name: str, uid: str, note: Note) -> None:
        """Write one Event, unless the same was written a moment ago."""
        digest = hashlib.sha256(f"{uid}\0{note.reason}\0{note.text}".encode()).hexdigest()[:16]
        key, now = f"{name[:200]}.{digest}", self._now()
        last, count = self._told.get(key, (None, 0))
        if last is not None and now - last < REPEAT:
            return
        self._told[key] = (now, count + 1)
        self._told.move_to_end(key)
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        regarding = {"apiVersion": API_VERSION, "kind": kind, "namespace": namespace, "name": name, "uid": uid}
        try:
            await self._create(namespace, key, regarding, note, now=now, count=max(2, count + 1))
        except ApiError as error:
            _log.warning("event not written", reason=note.reason, error=str(error))

    async def _create(
        self, namespace: str, key: str, regarding: dict[str, str], note: Note, *, now: datetime, count: int
    ) -> None:
        body: dict[str, Any] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": key, "namespace": namespace},
            "eventTime": _micro(now),
            "reportingController": REPORTING_CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": note.action,
            "reason": note.reason,
            "regarding": regarding,
            "note": note.text.encode()[:NOTE_BYTES].decode(errors="ignore"),
            "type": "Warning" if note.warning else "Normal",
        }
        try:
            await self._kube.create(paths.events(namespace), body)
        except ApiConflict:
            # Written before, perhaps by an earlier process: the operator may not read Events, so the count is its own.
            series = {"count": count, "lastObservedTime": _micro(now)}
            await self._kube.merge(paths.events(namespace, key), {"series": series})


def _micro(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
