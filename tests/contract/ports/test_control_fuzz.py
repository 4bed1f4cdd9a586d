"""Whatever is sent to a control route: a typed answer, never a 500, never a traceback, and the engine goes on."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelswap_engine.http.health import OPEN_PATHS
from modelswap_engine.protocol.version import CONTROL_PREFIX
from tests.support.examples import examples
from tests.support.ports import open_ports

KEYS = [
    "operationId", "fence", "podUid", "ownerUid", "epoch", "revision", "target", "uri", "version", "digest", "traffic",
    "source", "name", "baseDigest", "pinned", "drainTimeoutSeconds",
    "mode", "timeoutSeconds", "onTimeout", "loading", "verify", "keepPrevious", "leaseId", "seconds", "pattern",
    "updateId", "owner", "names", "segment", "tensors", "name", "dtype", "shape", "offset", "sha256", "loader",
    "group", "address", "port", "rank", "size", "backend", "root", "flattened", "shardBytes", "rows",
]  # fmt: skip
COMPAT_KEYS = [
    "mode", "selector", "model_path", "load_format", "weight_version", "serialized_named_tensors", "names", "dtypes",
    "shapes", "group_name", "zmq_handles", "segment", "tensors", "master_address", "master_port", "rank_offset",
    "world_size", "backend", "ports", "group_rank", "new_version", "action", "name", "truncate_size", "path", "url",
    "max_size", "lora_name", "lora_path", "pinned", "init_info", "update_info", "dtype_names", "packed", "baseline",
]  # fmt: skip
QUERIES = [
    "owner", "loader", "mode", "clear_cache", "name", "truncate_size", "weight_version", "abort_all_requests",
    "selector", "load_format",
]  # fmt: skip
VALUES = [
    "",
    "Drain",
    "Diff",
    "pod-1",
    "owner-1",
    "file:///models/1.0",
    "file:///etc/passwd",
    "[",
    "*",
    "sha256:x",
    "op",
    "1" * 5000,
    "\u00b2",
]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8),
    st.sampled_from(VALUES),
)  # fmt: skip
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(KEYS + COMPAT_KEYS) | st.text(max_size=4), inner, max_size=8),
    ),
    max_leaves=20,
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "operationId": scalars,
        "fence": st.fixed_dictionaries(
            {"podUid": st.just("pod-1")},
            optional={"ownerUid": scalars, "epoch": scalars, "revision": st.integers(-5, 10**20) | scalars},
        ),
        "target": st.fixed_dictionaries({}, optional={"uri": scalars, "digest": scalars, "version": scalars}),
        "traffic": st.fixed_dictionaries(
            {}, optional={"mode": scalars, "timeoutSeconds": scalars, "onTimeout": scalars}
        ),
        "source": st.fixed_dictionaries(
            {},
            optional={"name": scalars, "uri": scalars, "digest": scalars, "baseDigest": scalars, "pinned": scalars},
        ),
        "drainTimeoutSeconds": scalars,
        "leaseId": scalars,
        "updateId": scalars,
        "seconds": scalars,
        "pattern": scalars,
    },
)
compat_requests = st.dictionaries(st.sampled_from(COMPAT_KEYS), documents, max_size=5)
bodies = st.one_of(
    st.binary(max_size=64), st.one_of(documents, requests, compat_requests).map(json.dumps).map(str.encode)
)
kinds = st.sampled_from(["application/json", "application/octet-stream", "text/plain; charset=x", "multipart/x"])
queries = st.dictionaries(
    st.sampled_from(QUERIES), st.sampled_from(VALUES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=3,
)  # fmt: skip


class Target:
    """One running sidecar and the loop it runs in, for many examples."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._context = open_ports(folder)
        self.ports = self.loop.run_until_complete(self._context.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._context.__aexit__(None, None, None))
        self.loop.close()

    def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], query: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        async def go() -> tuple[int, bytes]:
            # Each on a connection of its own: one that answered before it had read all of a body is closed by the
            # server, which a client that takes it up again at that moment sees as a failure of the next request.
            alone = {**headers, "Connection": "close"}
            async with self.ports.control.request(method, path, data=body, headers=alone, params=query) as response:
                return response.status, await response.read()

        return self.loop.run_until_complete(go())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    sidecar = Target(tmp_path_factory.mktemp("fuzz"))
    sidecar.send("POST", f"{CONTROL_PREFIX}/updates", b'{"updateId": "op", "seconds": 3600}', {})
    yield sidecar
    sidecar.close()


def assert_typed(status: int, body: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(body)
    assert status < 500 or status == 503, body
    if status >= 400:
        assert answer["error"]["code"]
        assert answer["error"]["message"]
    assert b"Traceback" not in body
    return answer


relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def assert_answered(route: tuple[str, str], status: int, body: bytes) -> None:
    """Every refusal says what is wrong; SGLang's own text for one that trainers look at is the exception."""
    assert status < 500 or status == 503, (route, body)
    assert b"Traceback" not in body, route
    if status >= 400 and body != b"Flush cache failed.\n" and not route[1].endswith(("/health", "/health_generate")):
        assert json.loads(body)["error"]["message"], route


def test_any_body_to_any_route(target: Target) -> None:
    """The routes are the application's own: one that is added is sent junk, too."""
    routes = [route for route in target.ports.control_routes if route[1] not in OPEN_PATHS]
    assert len(routes) > 60

    for route in routes:
        method, path = route[0], route[1].replace("{id}", "op").replace("{name}", "one")
        assert "{" not in path

        @settings(relaxed, max_examples=examples(6))
        @given(body=bodies, kind=kinds, query=queries)
        def answered(body: bytes, kind: str, query: dict[str, str]) -> None:
            assert_answered(route, *target.send(method, path, body, {"Content-Type": kind}, query))  # noqa: B023

        answered()


segments = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)


@relaxed
@given(identity=segments, last=st.text("0123456789x", max_size=25))
def test_any_operation_id(target: Target, identity: str, last: str) -> None:
    from urllib.parse import quote

    for tail in ("", "/events"):
        path = f"{CONTROL_PREFIX}/swaps/{quote(identity, safe='')}{tail}"
        status, body = target.send("GET", path, b"", {"Last-Event-ID": last} if last else {})
        if status == 200:
            continue
        assert_typed(status, body)


@relaxed
@given(name=segments | st.sampled_from([".", "..", "a/b", "a//b", "%2e%2e/x"]), body=bodies)
def test_any_adapter_name(target: Target, name: str, body: bytes) -> None:
    from urllib.parse import quote

    for safe in ("", "/"):
        path = f"{CONTROL_PREFIX}/adapters/{quote(name, safe=safe)}"
        for method in ("GET", "DELETE"):
            assert_typed(*target.send(method, path, body, {}))


@relaxed
@given(value=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30))
def test_any_if_match(target: Target, value: str) -> None:
    body = json.dumps(
        {"operationId": "if-match", "fence": {"podUid": "pod-1", "revision": 10**9}, "target": {}}
    ).encode()
    assert_typed(*target.send("POST", f"{CONTROL_PREFIX}/swaps", body, {"If-Match": value}))


def test_afterwards_it_still_serves(target: Target) -> None:
    for lease in list(target.ports.coordinator._core.gate._leases):
        target.send("POST", f"{CONTROL_PREFIX}/resume", json.dumps({"leaseId": lease}).encode(), {})
    state = assert_typed(*target.send("GET", f"{CONTROL_PREFIX}/state", b"", {}))
    assert state["live"]["version"] == "1.0"
