"""Prometheus metrics of the operator; labels are bounded, object names are never one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PASS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All series of one process, in a registry of its own.

    Args:
        clock_ahead: says how many seconds later it is by the system's clock than by the operator's.
    """

    def __init__(self, *, clock_ahead: Callable[[], float] = lambda: 0.0) -> None:
        registry = self.registry = CollectorRegistry()
        self._total = Counter(
            "modelswap_reconcile_total", "Passes over an object.", ["kind", "result"], registry=registry
        )
        self._errors = Counter(
            "modelswap_reconcile_errors_total", "Passes that ended with an error.", ["kind"], registry=registry
        )
        self._seconds = Histogram(
            "modelswap_reconcile_time_seconds",
            "Time of one pass.",
            ["kind"],
            buckets=PASS_BUCKETS,
            registry=registry,
        )
        self._active = Gauge("modelswap_active_workers", "Passes under way.", ["kind"], registry=registry)
        self._depth = Gauge(
            "modelswap_workqueue_depth",
            "Objects whose pass was asked for and has not begun.",
            ["kind"],
            registry=registry,
        )
        self._longest = Gauge(
            "modelswap_workqueue_longest_running_processor_seconds",
            "How long the oldest pass under way has been going on.",
            ["kind"],
            registry=registry,
        )
        self._adds = Counter(
            "modelswap_workqueue_adds_total",
            "Passes asked for, by an event or because it was time; several before one are one.",
            ["kind"],
            registry=registry,
        )
        self._retries = Counter(
            "modelswap_workqueue_retries_total",
            "Passes that are made once more after an error or a conflict.",
            ["kind"],
            registry=registry,
        )
        self._waited = Histogram(
            "modelswap_workqueue_queue_duration_seconds",
            "From asking for a pass until it begins.",
            ["kind"],
            buckets=PASS_BUCKETS,
            registry=registry,
        )
        self._objects = Gauge(
            "modelswap_objects",
            "Objects by what they are, such as Ready or Stalled.",
            ["kind", "standing"],
            registry=registry,
        )
        self._writes = Counter("modelswap_status_writes_total", "Status writes.", ["kind"], registry=registry)
        self._requests = Counter(
            "modelswap_rest_client_requests_total",
            "Requests to the API server, without watches.",
            ["code", "method"],
            registry=registry,
        )
        self._request_seconds = Histogram(
            "modelswap_rest_client_request_duration_seconds",
            "Time of one request to the API server.",
            ["method"],
            registry=registry,
        )
        self._leader = Gauge("modelswap_leader", "1 while this process decides.", registry=registry)
        self._epoch = Gauge("modelswap_leader_epoch", "Fencing epoch of this process.", registry=registry)
        self._outdone = Counter(
            "modelswap_stale_leader_total", "Passes that met a decision under a higher epoch.", registry=registry
        )
        self._watch = Gauge(
            "modelswap_watch_last_event_timestamp_seconds",
            "When the watch of a resource last delivered an event.",
            ["resource"],
            registry=registry,
        )
        self._authorities = Gauge(
            "modelswap_authority_expiry_timestamp_seconds",
            "When the last of the authorities that are believed does not hold any more.",
            ["port"],
            registry=registry,
        )
        Gauge(
            "modelswap_clock_ahead_seconds",
            "By how much the system's clock was set forward since this process began.",
            registry=registry,
        ).set_function(clock_ahead)

    @contextmanager
    def working(self, kind: str) -> Iterator[None]:
        """Count a pass as under way."""
        self._active.labels(kind).inc()
        try:
            yield
        finally:
            self._active.labels(kind).dec()

    def asked(self, kind: str) -> None:
        """Count a pass that was asked for."""
        self._adds.labels(kind).inc()

    def begun(self, kind: str, waited: float) -> None:
        """Note that a pass that was asked for begins, after so many seconds."""
        self._waited.labels(kind).observe(waited)

    def queue(self, kind: str, *, depth: Callable[[], float], longest: Callable[[], float]) -> None:
        """Learn who says, whenever it is asked, how many wait for a pass and for how long the oldest one goes on."""
        self._depth.labels(kind).set_function(depth)
        self._longest.labels(kind).set_function(longest)

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        """Count a pass: success, requeue, requeue_after or error."""
        self._total.labels(kind, result).inc()
        self._seconds.labels(kind).observe(seconds)
        if result == "error":
            self._errors.labels(kind).inc()
        if result in ("error", "requeue"):
            self._retries.labels(kind).inc()

    def standing(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Say how many objects there are by kind and by what they are; what is not named is there no more."""
        self._objects.clear()
        for labels, count in counts.items():
            self._objects.labels(*labels).set(count)

    def status_written(self, kind: str) -> None:
        """Count a status write."""
        self._writes.labels(kind).inc()

    def requested(self, method: str, code: str, seconds: float) -> None:
        """Count a request to the API server."""
        self._requests.labels(code, method).inc()
        self._request_seconds.labels(method).observe(seconds)

    def leading(self, epoch: int) -> None:
        """Say that this process decides, under this epoch."""
        self._leader.set(1)
        self._epoch.set(epoch)

    def outdone(self) -> None:
        """Count a pass that met a decision under a higher epoch than this process has."""
        self._outdone.inc()

    def authorities_expire(self, at: float) -> None:
        """Say when the last of the authorities of control ports does not hold any more."""
        self._authorities.labels("control").set(at)

    def seen(self, resource: str) -> None:
        """Note a watch event."""
        self._watch.labels(resource).set(time())
