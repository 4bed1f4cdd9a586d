"""Prometheus metrics of one sidecar, in a registry of its own.

Counters and histograms are fed by the ports; everything that is a state (versions, gate, memory) is read from the
coordinator at scrape time, so that it can never disagree with ``GET /state``.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from modelswap_engine.http.answers import AnswerTally
from modelswap_engine.protocol.adapters import AdapterRegistry, AdapterState
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState

PREFIX: Final = "modelswap"
_PAUSE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SWAP_BUCKETS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_COMMIT_BUCKETS: Final = (1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0)
_FIRST_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_VERSION_SERIES: Final = 16
"""How many versions keep request counters; the oldest go, or 1000 swaps would be 1000 series."""

PHASES: Final[dict[SwapState, str]] = {
    SwapState.PLANNED: "plan",
    SwapState.FETCHING: "fetch",
    SwapState.STAGED: "prepare",
    SwapState.PREPARED: "drain",
    SwapState.PAUSING: "pause",
    SwapState.COMMITTING: "commit",
    SwapState.COMMITTED: "verify",
    SwapState.VERIFIED: "resume",
    SwapState.ROLLING_BACK: "rollback",
}


class Metrics:
    """Everything ``GET /metrics`` shows."""

    def __init__(self, state: Callable[[], EngineState]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._versions: dict[str, set[str]] = {}
        self.answers = AnswerTally()
        self.swaps = self._counter("swap", "Finished swap operations.", ["outcome"])
        self.swap_seconds = self._histogram(
            "swap_duration_seconds", "Time spent in each phase of a swap.", _SWAP_BUCKETS, ["phase"]
        )
        self.pause_seconds = self._histogram(
            "pause_duration_seconds", "Gate closed to gate open: what a new request waits at most.", _PAUSE_BUCKETS
        )
        self.stop_seconds = self._histogram(
            "stop_latency_seconds", "Closing the gate to the engine standing at a step boundary.", _PAUSE_BUCKETS
        )
        self.commit_seconds = self._histogram(
            "commit_window_seconds", "Step boundary until the new tensors are live on all ranks.", _COMMIT_BUCKETS
        )
        self.fetched_bytes = self._counter(
            "fetched_bytes", "Tensor bytes that swaps read from sources and from other pods of the slot.", ["from"]
        )
        self.served_bytes = self._counter("served_bytes", "Bytes given to other pods of the slot.", [])
        self.requests = self._counter("requests", "Finished requests of the data port.", ["version", "outcome"])
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Request received to first token.", _FIRST_TOKEN_BUCKETS, ["version"]
        )
        self._gate_wait = self._histogram(
            "gate_wait_seconds",
            "Request received to being let in, its adapter included.",
            _PAUSE_BUCKETS,
            ["version"],
        )
        self.requests_in_flight = Gauge(
            f"{PREFIX}_http_requests_in_flight", "Requests the data port is working on.", registry=self.registry
        )
        self._certificates = Gauge(
            f"{PREFIX}_certificate_expiry_timestamp_seconds",
            "When the certificate that a port shows does not hold any more.",
            ["port"],
            registry=self.registry,
        )
        self.registry.register(_StateCollector(state))

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, labels, buckets=buckets, registry=self.registry)

    def certificate_expires(self, at: float) -> None:
        """Say when the control port's certificate does not hold any more."""
        self._certificates.labels("control").set(at)

    def count_request(self, admitted: VersionRef | None, outcome: str) -> None:
        """Count one finished request of the data port; ``admitted`` is None for one that was not let in."""
        if admitted is not None:
            self.answers.count(admitted.digest, outcome)
        version = admitted.version if admitted is not None else ""
        self._seen(version).add(outcome)
        self.requests.labels(version, outcome).inc()

    def let_in(self, version: str, seconds: float) -> None:
        """Record how long a request waited until it was let in to a version."""
        self._seen(version)
        self._gate_wait.labels(version).observe(seconds)

    def first_token(self, version: str, seconds: float) -> None:
        """Record how long the first token of an answer took."""
        self._seen(version)
        self._first_token.labels(version).observe(seconds)

    def _seen(self, version: str) -> set[str]:
        """Return the outcomes that a version has series for; the oldest version's series go when there are many."""
        outcomes = self._versions.setdefault(version, set())
        while len(self._versions) > _VERSION_SERIES:
            oldest = next(iter(self._versions))
            for outcome in self._versions.pop(oldest):
                self.requests.remove(oldest, outcome)
            for histogram in (self._first_token, self._gate_wait):
                with contextlib.suppress(KeyError):
                    histogram.remove(oldest)
        return outcomes

    def phase(self, state: SwapState, seconds: float) -> None:
        """Record how long an operation was in a state."""
        if state in PHASES:
            self.swap_seconds.labels(PHASES[state]).observe(seconds)

    def finished(self, status: SwapStatus) -> None:
        """Record the end of an operation."""
        self.swaps.labels(status.state.value).inc()
        self.fetched_bytes.labels("source").inc(status.bytes_fetched)
        self.fetched_bytes.labels("peer").inc(status.bytes_from_peers)
        if status.pause_seconds is not None:
            self.pause_seconds.observe(status.pause_seconds)
        if status.stop_latency_seconds is not None:
            self.stop_seconds.observe(status.stop_latency_seconds)
        if status.commit_window_microseconds is not None:
            self.commit_seconds.observe(status.commit_window_microseconds / 1e6)


class _StateCollector(Collector):
    """Turns the engine's state into gauges when asked."""

    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._state = state

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        yield from self._versions(state)
        yield self._engine(state)
        gate = state.gate
        yield _gauge("gate_open", "1 when new requests pass.", float(gate.open))
        yield _gauge("gate_queue_length", "Requests waiting at the gate.", gate.queued)
        yield _total("gate_closures", "How often the gate closed.", gate.closures)
        yield _total("gate_waits", "Requests that found the gate closed and had to wait.", gate.waits)
        yield _gauge("update_lock_oldest_seconds", "Age of the oldest request inside.", gate.oldest_in_flight_seconds)
        yield _gauge("requests_in_flight", "Requests inside the gate.", gate.in_flight)
        yield _gauge("revision", "Revision of the last accepted decision.", state.revision)
        yield _gauge("swaps_completed", "Swaps completed since this process started.", state.swaps_completed)
        yield _gauge("worker_restarts", "Worker restarts since this process started.", state.restarts)
        yield _gauge("drifted_tensors", "Live tensors that are not what their version says.", len(state.drifted))
        yield _gauge("repairs", "Repairs of live tensors since this process started.", state.repairs)
        yield _gauge(
            "cold_restart_advised", "1 when memory has grown or fragmented.", float(bool(state.restart_advice))
        )
        yield from self._memory(state)
        yield from self._ranks(state)
        if state.adapters is not None and state.adapters.slots:
            yield from self._adapters(state.adapters)

    @staticmethod
    def _versions(state: EngineState) -> Iterator[Metric]:
        live = state.live
        if live is not None:
            yield InfoMetricFamily(
                f"{PREFIX}_active_version",
                "The version that is live and proved.",
                value={"version": live.version, "digest": live.digest},
            )

    @staticmethod
    def _engine(state: EngineState) -> Metric:
        current = "quarantined" if state.quarantined else "ready" if state.ready else "not_ready"
        family = GaugeMetricFamily(f"{PREFIX}_engine_state", "1 for what the engine is now.", labels=["state"])
        for name in ("ready", "not_ready", "quarantined"):
            family.add_metric([name], float(name == current))
        return family

    @staticmethod
    def _adapters(found: AdapterRegistry) -> Iterator[Metric]:
        family = GaugeMetricFamily(f"{PREFIX}_adapters", "LoRA adapters by state.", labels=["state"])
        for name in AdapterState:
            count = sum(status.state is name for status in found.adapters)
            if name is not AdapterState.UNLOADED:
                family.add_metric([name.value], float(count))
        yield family
        yield _gauge("adapter_slots", "Slots for adapters.", found.slots)
        yield _gauge("adapter_slots_used", "Slots that hold an adapter.", found.slots_used)
        problems = len(found.assigned.problems) if found.assigned is not None else 0
        yield _gauge("adapter_problems", "Assigned adapters that are not served as they are assigned.", problems)
        yield _gauge("adapter_loads", "Adapters read since this process started.", found.loads)
        yield _gauge("adapter_evictions", "Adapters that lost a slot to another one.", found.evictions)

    @staticmethod
    def _memory(state: EngineState) -> Iterator[Metric]:
        memory = state.memory
        family = GaugeMetricFamily(f"{PREFIX}_memory_bytes", "Where the engine's memory is.", labels=["kind"])
        kinds = ("model", "staged", "previous", "kv_cache", "adapter", "rss", "allocator_used", "allocator_reserved")
        for kind in kinds:
            family.add_metric([kind], float(getattr(memory, f"{kind}_bytes")))
        yield family
        if memory.limit_bytes >= 0:
            yield _gauge("memory_limit_bytes", "Memory limit of the engine process.", memory.limit_bytes)
        if memory.device_limit_bytes >= 0:
            yield _gauge("device_memory_limit_bytes", "Memory of the engine's devices.", memory.device_limit_bytes)
            free = memory.device_available_bytes
            yield _gauge("device_memory_available_bytes", "What tensors can still take of the devices.", free)

    @staticmethod
    def _ranks(state: EngineState) -> Iterator[Metric]:
        labels = ["rank", "replica"]
        alive = GaugeMetricFamily(f"{PREFIX}_rank_alive", "1 for a worker process that answers.", labels=labels)
        proved = GaugeMetricFamily(
            f"{PREFIX}_rank_proved", "1 for one that has proved the live version since its start.", labels=labels
        )
        running = GaugeMetricFamily(
            f"{PREFIX}_replica_requests", "Requests that a replica computes.", labels=["replica"]
        )
        restarts = GaugeMetricFamily(
            f"{PREFIX}_replica_restarts", "How often a replica's processes were started again.", labels=["replica"]
        )
        live = state.live.digest if state.live is not None else ""
        for rank in state.ranks:
            names = [str(rank.rank), str(rank.replica)]
            alive.add_metric(names, float(rank.alive))
            proved.add_metric(names, float(bool(live) and rank.alive and rank.digest == live))
        for replica in sorted({rank.replica for rank in state.ranks}):
            ranks = [rank for rank in state.ranks if rank.replica == replica]
            running.add_metric([str(replica)], sum(rank.running for rank in ranks))
            restarts.add_metric([str(replica)], max(rank.restarts for rank in ranks))
        yield from (alive, proved, running, restarts)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
