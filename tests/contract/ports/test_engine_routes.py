"""The two routes for an engine's own container: through the real control port, the hook as a real process."""

import asyncio
import contextlib
import os
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
import trustme
from aiohttp import ClientSession

from modelswap_engine.backends.external import handshake
from modelswap_engine.backends.external.handshake import Boot
from modelswap_engine.http.app import control_app, listening
from modelswap_engine.http.auth import TokenFileAuthenticator
from modelswap_engine.http.engine import DRAIN, LIVEZ, EngineCase, EngineRoutes, begins_anew
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.spool import Spool
from modelswap_engine.http.tls import Certificate
from modelswap_engine.swap.clock import SystemClock
from tests.support.cache import REPOSITORY
from tests.support.pki import write_pair
from tests.support.ports import Ports

START_SECONDS = 900.0


def boot(number: int) -> Boot:
    return Boot(boot_id=f"boot-{number}", admin_key=f"key-{number}", engine="vllm", port=8100, digest="sha256:abc")


class Ticks(SystemClock):
    """A clock whose one sleeper is awaited, and woken by hand.

    Attributes:
        ahead: seconds by which it goes before the system's.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        self.asleep = asyncio.Event()
        self._wake = asyncio.Event()

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    async def sleep(self, seconds: float) -> None:
        self.asleep.set()
        await self._wake.wait()
        self._wake.clear()

    async def tick(self) -> None:
        await self.asleep.wait()
        self.asleep.clear()
        self._wake.set()


@dataclass
class Pod:
    """A sidecar's control port with these routes, and the volume that it shares with a launcher."""

    runtime: Path
    port: int
    client: ClientSession
    routes: EngineRoutes
    clock: "Ticks"
    wanted: str = ""
    start: str = ""
    allowed: bool = True
    quarantined: bool = False
    drains: int = 0
    requests_gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def starts(self, number: int) -> None:
        """Be the launcher that starts an engine."""
        await asyncio.to_thread(handshake.report, self.runtime, boot(number))

    async def hook(self, *options: str, seconds: float = 30) -> tuple[int, str]:
        """Run the preStop hook as the container does, and return its exit code and what it said."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-m", "modelswap_engine.backends.drain",
            f"--control-port={self.port}", f"--seconds={seconds}", f"--runtime-dir={self.runtime}", *options,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "engine"), "http_proxy": "http://127.0.0.1:9"},
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        return process.returncode or 0, said.decode()


@contextlib.asynccontextmanager
async def opened(ports: Ports, folder: Path, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Pod]:
    """Serve the control port of a sidecar whose engine has a container of its own."""
    runtime = folder / "run"
    runtime.mkdir()
    clock = Ticks()
    pod: Pod

    async def drain() -> None:
        pod.drains += 1
        await pod.requests_gone.wait()

    async def case() -> EngineCase:
        quarantined = pod.quarantined or ports.coordinator.stuck
        return EngineCase(wanted=pod.wanted, quarantined=quarantined, allowed=pod.allowed, start=pod.start)

    routes = EngineRoutes(
        case=case,
        boot=lambda: handshake.read_boot(runtime),
        drain=drain,
        clock=clock,
        start_seconds=START_SECONDS,
    )
    app = control_app(
        coordinator=ports.coordinator,
        authenticator=TokenFileAuthenticator(ports.tokens),
        metrics=Metrics(ports.coordinator.state),
        spool=Spool(folder / "engine-bodies"),
        engine=routes,
    )
    async with (
        listening(app, host="127.0.0.1", port=0, cancel_abandoned=False, tls=tls) as port,
        ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        pod = Pod(runtime=runtime, port=port, client=client, routes=routes, clock=clock)
        yield pod


@pytest.fixture
async def pod(ports: Ports, tmp_path: Path) -> AsyncIterator[Pod]:
    async with opened(ports, tmp_path) as made:
        yield made


async def test_the_engine_lives_on_until_a_restart_is_wanted(pod: Pod) -> None:
    assert (await pod.client.get(LIVEZ)).status == 200
    pod.wanted = "a collective call failed"
    answer = await pod.client.get(LIVEZ)
    assert (answer.status, await answer.text()) == (503, "restart: a collective call failed\n")
    pod.allowed = False
    assert (await pod.client.get(LIVEZ)).status == 200


async def test_a_start_that_takes_its_time_is_not_killed_for_what_the_one_before_did(pod: Pod) -> None:
    await pod.starts(1)
    assert (await pod.client.get(LIVEZ)).status == 200
    pod.wanted, pod.start = "a collective call failed", "one"
    assert (await pod.client.get(LIVEZ)).status == 503
    await pod.starts(2)
    answer = await pod.client.get(LIVEZ)
    assert (answer.status, await answer.text()) == (200, "started again, not up yet: a collective call failed\n")
    pod.wanted, pod.start = "it holds other weights", "two"  # the next one is not right either
    assert (await pod.client.get(LIVEZ)).status == 503


async def test_a_start_that_never_comes_up_is_killed_in_its_turn(pod: Pod) -> None:
    await pod.starts(1)
    assert (await pod.client.get(LIVEZ)).status == 200
    pod.wanted = "a collective call failed"
    await pod.starts(2)
    assert (await pod.client.get(LIVEZ)).status == 200
    pod.clock.ahead = START_SECONDS + 1
    assert (await pod.client.get(LIVEZ)).status == 503
    await pod.starts(3)
    assert (await pod.client.get(LIVEZ)).status == 200


async def test_a_start_that_followed_one_that_died_by_itself_is_not_killed(pod: Pod) -> None:
    await pod.starts(1)
    watching = asyncio.ensure_future(pod.routes.begun_anew())
    await pod.clock.tick()
    await pod.clock.asleep.wait()
    pod.wanted = "a collective call failed"
    await pod.starts(2)  # before anybody asked again
    assert (await pod.client.get(LIVEZ)).status == 200
    watching.cancel()


async def test_a_quarantine_restarts_the_engine_and_not_the_sidecar(pod: Pod) -> None:
    pod.quarantined = True
    assert (await pod.client.get(LIVEZ)).status == 503
    assert (await pod.client.get("/livez")).status == 200


async def test_other_routes_still_need_a_token(pod: Pod) -> None:
    assert (await pod.client.get("/modelswap/v1/state")).status == 401


async def test_without_an_engine_apart_there_are_no_such_routes(ports: Ports) -> None:
    assert (await ports.control.get(LIVEZ)).status == 404
    assert (await ports.control.post(DRAIN)).status == 404
    assert (await ports.anonymous.get(LIVEZ)).status == 401


async def test_the_hook_reaches_a_control_port_with_tls(ports: Ports, tmp_path: Path) -> None:
    files = write_pair(trustme.CA(), tmp_path, "modelswap-control.team.svc")
    context = await asyncio.to_thread(lambda: Certificate(certificate=files.certificate, key=files.key).context)
    async with opened(ports, tmp_path, tls=context) as pod:
        await pod.starts(1)
        pod.requests_gone.set()
        assert await pod.hook("--tls") == (0, "modelswap drain: drained\n")
        assert (await pod.hook())[0] == 1
    assert pod.drains == 1


async def test_the_hook_returns_when_no_request_is_left(pod: Pod) -> None:
    await pod.starts(1)
    hook = asyncio.ensure_future(pod.hook())
    while not pod.drains:
        await asyncio.sleep(0.01)
    assert not hook.done()
    pod.requests_gone.set()
    assert await hook == (0, "modelswap drain: drained\n")


async def test_a_hook_that_gives_up_ends_no_drain_and_two_hooks_make_one(pod: Pod) -> None:
    await pod.starts(1)
    code, said = await pod.hook(seconds=0.3)
    assert code == 1
    assert "not drained" in said
    again = asyncio.ensure_future(pod.hook())
    pod.requests_gone.set()
    assert (await again)[0] == 0
    assert pod.drains == 1


@pytest.mark.parametrize("key", ["", "Bearer key-2", "Bearer ", "key-1", "Basic key-1"])
async def test_nobody_else_can_take_the_pod_out_of_service(pod: Pod, key: str) -> None:
    await pod.starts(1)
    answer = await pod.client.post(DRAIN, headers={"Authorization": key} if key else {})
    assert answer.status == 401
    assert pod.drains == 0


async def test_no_key_is_right_while_no_engine_runs_or_its_word_is_not_believed(pod: Pod) -> None:
    assert (await pod.client.post(DRAIN, headers={"Authorization": "Bearer "})).status == 401
    assert await pod.hook() == (0, "modelswap drain: no engine runs; nothing to drain\n")
    await pod.starts(1)
    (pod.runtime / handshake.ENGINE_FILE).chmod(0o644)
    assert (await pod.client.post(DRAIN, headers={"Authorization": "Bearer key-1"})).status == 401
    assert (await pod.hook())[0] == 1


async def test_an_engine_that_is_to_be_replaced_drains_nothing(pod: Pod) -> None:
    await pod.starts(1)
    pod.wanted = "it does not answer"
    code, said = await pod.hook()
    assert (code, pod.drains) == (0, 0), said
    assert "not drained" in said


@pytest.mark.parametrize("over", ["drained", "quarantined", "in service"])
async def test_a_sidecar_that_was_over_begins_anew_with_the_engine(pod: Pod, over: str) -> None:
    await pod.starts(1)
    anew = asyncio.ensure_future(pod.routes.begun_anew())
    await pod.clock.tick()
    await pod.clock.asleep.wait()
    pod.quarantined = over == "quarantined"
    pod.requests_gone.set()
    if over == "drained":
        assert (await pod.hook())[0] == 0
    await pod.clock.tick()  # it is over, but the engine is the same one
    await pod.clock.asleep.wait()
    await asyncio.to_thread(handshake.retract, pod.runtime)
    await pod.clock.tick()  # no engine at all
    await pod.clock.asleep.wait()
    await pod.starts(2)
    await pod.clock.tick()
    if over != "in service":
        await asyncio.wait_for(anew, 30)
        return
    await pod.clock.asleep.wait()
    assert not anew.done()  # a new engine under a sidecar that serves is caught up, not left
    anew.cancel()


@pytest.mark.parametrize(
    ("wanted", "quarantined", "allowed"), list(product(["", "it hangs"], [False, True], [False, True]))
)
def test_what_must_go(wanted: str, quarantined: bool, allowed: bool) -> None:
    case = EngineCase(wanted=wanted, quarantined=quarantined, allowed=allowed)
    assert bool(case.must_go) == (allowed and (bool(wanted) or quarantined))
    assert case.drains is not bool(case.must_go)
    if case.must_go and wanted:
        assert case.must_go == wanted


@pytest.mark.parametrize(
    ("before", "now", "anew"), [("", "", False), ("a", "", False), ("a", "a", False), ("a", "b", True), ("", "b", True)]
)
def test_when_a_sidecar_begins_anew(before: str, now: str, anew: bool) -> None:
    assert begins_anew(before=before, now=now) is anew
