"""Traces of a swap, from the operator's client through the engine's real control port, with the SDK behind the API."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from modelswap_engine.protocol import telemetry
from modelswap_engine.protocol.errors import Internal, StateMoved
from modelswap_engine.protocol.messages import Fence, SwapRequest, SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.telemetry import OPERATION, Span
from modelswap_operator.effects.engine_client import Address, EngineClient
from tests.support.cache import REPOSITORY
from tests.support.fake_backend import Fault
from tests.support.ports import POD, TOKEN, Ports, open_ports

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Token:
    async def token(self, pod_uid: str) -> str | None:
        return TOKEN

    def forget(self, pod_uid: str) -> None:
        return None


class Pair:
    """A sidecar, the operator's way to it, and the spans of both."""

    def __init__(self, ports: Ports, client: EngineClient, exporter: InMemorySpanExporter) -> None:
        self.ports, self._client, self._exporter = ports, client, exporter
        url = urlsplit(ports.control_url)
        self.pod = Address(pod="pod", uid=POD, namespace="team", ip=str(url.hostname), port=int(url.port or 0))

    async def swap(self, target: VersionRef, operation: str, *, traced: bool = True) -> SwapStatus:
        """Swap as a pass of the operator does, and see it to its end."""
        revision = self.ports.coordinator.state().revision + 1
        fence = Fence(pod_uid=POD, owner_uid="owner", epoch=1, revision=revision)
        order = SwapRequest(operation_id=operation, fence=fence, target=target)
        if traced:
            with telemetry.within(Span("reconcile", {"modelswap.slot": "chat"})):
                await self._client.swap(self.pod, order, if_match="*")
        else:
            await self._client.swap(self.pod, order, if_match="*")
        last = [status async for status in self.ports.coordinator.watch(operation)][-1]
        while not [span for span in self.spans() if span.name == "swap"]:
            await asyncio.sleep(0.01)
        return last

    async def look(self) -> None:
        await self._client.state(self.pod)

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans() if span.name == name]
        return found


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("modelswap"))
    return found


@pytest.fixture
async def pair(tmp_path: Path, exporter: InMemorySpanExporter) -> AsyncIterator[Pair]:
    async with open_ports(tmp_path) as ports, EngineClient(Token()) as client:
        yield Pair(ports, client, exporter)


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


async def test_operator_and_engine_tell_one_swap_in_one_trace(pair: Pair) -> None:
    target = pair.ports.publish("1.1", norm=b"N" * 2)
    await pair.swap(target, "op-1")
    names = [span.name for span in pair.spans()]
    phases = ["plan", "fetch", "prepare", "drain", "pause", "commit", "verify", "resume"]
    assert [name for name in names if name in phases] == phases
    assert sorted(names) == sorted([*phases, "POST /swaps", "reconcile", "swap"])
    assert len({span.context.trace_id for span in pair.spans() if span.context is not None}) == 1
    swap, call = pair.named("swap"), pair.named("POST /swaps")
    assert parent_of(call) == id_of(pair.named("reconcile"))
    assert parent_of(swap) == id_of(call)
    assert {parent_of(pair.named(name)) for name in phases} == {id_of(swap)}
    assert {span.attributes[OPERATION] for span in pair.spans() if span.attributes and span.name != "reconcile"} == {
        "op-1"
    }
    assert call.attributes is not None
    assert (call.attributes["k8s.pod.uid"], call.attributes["k8s.namespace.name"]) == (POD, "team")
    facts = dict(swap.attributes or {})
    assert facts["modelswap.outcome"] == "Serving"
    assert facts["modelswap.source.digest"] == pair.ports.template.digest
    assert facts["modelswap.target.digest"] == target.digest
    assert facts["modelswap.fetched.bytes"] == 2
    assert facts["modelswap.commit.microseconds"] == 5
    assert swap.status.is_ok or swap.status.is_unset


@pytest.mark.parametrize(
    ("step", "phase", "end"), [("stage", "fetch", SwapState.ABORTED), ("verify", "verify", SwapState.ROLLED_BACK)]
)
async def test_the_phase_that_failed_is_the_one_that_says_so(pair: Pair, step: str, phase: str, end: SwapState) -> None:
    pair.ports.backend.faults[step] = Fault.ERROR
    pair.ports.backend.error = Internal("told to fail")
    status = await pair.swap(pair.ports.publish("1.1", norm=b"N" * 2), "op-1")
    assert status.state is end
    failed = [span.name for span in pair.spans() if not (span.status.is_ok or span.status.is_unset)]
    assert failed == [phase, "swap"]
    assert pair.named("swap").status.description == "Internal"
    assert dict(pair.named("swap").attributes or {})["modelswap.outcome"] == end.value
    assert ("rollback" in [span.name for span in pair.spans()]) == (end is SwapState.ROLLED_BACK)


async def test_looking_is_not_traced_and_a_swap_by_hand_is_a_trace_of_its_own(pair: Pair) -> None:
    await pair.look()
    assert pair.spans() == []
    await pair.swap(pair.ports.publish("1.1", norm=b"N" * 2), "op-1", traced=False)
    assert parent_of(pair.named("swap")) is None


async def test_a_refused_call_is_a_failed_span(pair: Pair) -> None:
    order = SwapRequest(operation_id="op-1", fence=Fence(pod_uid=POD), target=pair.ports.template)
    with pytest.raises(StateMoved), telemetry.within(Span("reconcile", {})):
        await pair._client.swap(pair.pod, order, if_match='"other.1"')
    assert pair.named("POST /swaps").status.description == "StateMoved"


@pytest.mark.parametrize(
    "header", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", PARENT.upper(), PARENT * 100, "\x00"]
)
async def test_a_header_that_is_none_begins_no_trace(header: str) -> None:
    with telemetry.received({"traceparent": header}):
        assert not telemetry.under_way()
    with telemetry.received({"traceparent": PARENT}):
        assert telemetry.under_way()
    assert not telemetry.under_way()


async def test_only_who_has_a_token_is_joined(pair: Pair) -> None:
    seen: list[bool] = []
    state = pair.ports.coordinator.state
    pair.ports.coordinator.state = lambda: (seen.append(telemetry.under_way()), state())[1]  # type: ignore[assignment,method-assign,func-returns-value]
    route = "/modelswap/v1/state"
    assert (await pair.ports.anonymous.get(route, headers={"traceparent": PARENT})).status == 401
    assert True not in seen
    assert (await pair.ports.control.get(route, headers={"traceparent": PARENT})).status == 200
    assert seen[-1]


async def test_log_lines_carry_the_ids(pair: Pair) -> None:
    lines: list[dict[str, object]] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(dict(telemetry.add_ids(None, "", {"event": record.getMessage()})))

    handler, log = Keeping(), logging.getLogger("modelswap.swap")
    log.addHandler(handler)
    try:
        pair.ports.backend.faults |= {"verify": Fault.ERROR, "rollback": Fault.ERROR}
        await pair.swap(pair.ports.publish("1.1", norm=b"N" * 2), "op-1")
    finally:
        log.removeHandler(handler)
    call = pair.named("POST /swaps").context
    assert call is not None
    assert {line.get("trace_id") for line in lines if "rolling back" in str(line["event"])} == {f"{call.trace_id:032x}"}
    assert telemetry.add_ids(None, "", {"event": "x"}) == {"event": "x"}


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(REPOSITORY / "engine"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **variables}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip


USE = """
import logging, sys
logging.basicConfig(level="INFO")
{before}
from modelswap_engine.protocol import telemetry
telemetry.export("tried")
with telemetry.received({{"traceparent": "{parent}"}}), telemetry.within(telemetry.Span("one", {{"a": 1}})):
    with telemetry.call("two", {{}}):
        headers = {{}}
        telemetry.send(headers)
        print("headers", sorted(headers), telemetry.under_way())
"""


def test_without_the_package_nothing_is_different() -> None:
    without = USE.format(parent=PARENT, before="sys.modules['opentelemetry'] = None")
    assert run(without).stdout == "headers [] False\n"
    told = run(without, OTEL_TRACES_EXPORTER="console")
    assert told.stdout == "headers [] False\n"
    assert "needs the packages opentelemetry-sdk" in told.stderr


def test_spans_go_where_the_environment_says() -> None:
    code = USE.format(parent=PARENT, before="")
    said = run(code, OTEL_TRACES_EXPORTER="console").stdout
    assert said.index("headers ['traceparent'] True") >= 0
    assert [said.count(f'"name": "{name}"') for name in ("one", "two")] == [1, 1]
    assert PARENT.split("-")[1] in said
    assert '"service.name": "tried"' in said
    assert '"service.name": "mine"' in run(code, OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="mine").stdout
    for nothing in ("", "none"):
        assert run(code, OTEL_TRACES_EXPORTER=nothing).stdout == "headers ['traceparent'] True\n"
    missing = run(code, OTEL_TRACES_EXPORTER="nobody")
    assert "no traces are exported" in missing.stderr
