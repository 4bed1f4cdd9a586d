"""The control port with TLS: certificates that are renewed under it, and everybody who calls it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from aiohttp import ClientSession, web
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from modelswap_engine.cli.client import ControlClient, Trust
from modelswap_engine.cli.main import app as command_line
from modelswap_engine.http.app import control_app, listening
from modelswap_engine.http.auth import TokenFileAuthenticator
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.spool import Spool
from modelswap_engine.http.tls import Certificate, certified
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import BadRequest, Unauthenticated, Unavailable
from modelswap_engine.sources.peers.client import Access
from modelswap_engine.swap.clock import SystemClock
from modelswap_operator.cli.doctor import _readyz
from modelswap_operator.cli.engines import Engines
from modelswap_operator.cli.kubectl import Kubectl
from tests.support.pki import Files, put, write_pair
from tests.support.ports import POD, TOKEN, Ports
from tests.support.serve import Served

NAME = "modelswap-control.team.svc"
AUTHORITY = trustme.CA()
Believing = Callable[[Path], ssl.SSLContext]


class Ticks(SystemClock):
    """A clock whose sleeper is woken by hand; :meth:`tick` returns when it sleeps again."""

    def __init__(self) -> None:
        self._asleep, self._wake = asyncio.Event(), asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self._asleep.set()
        await self._wake.wait()
        self._wake.clear()

    async def tick(self) -> None:
        await self._asleep.wait()
        self._asleep.clear()
        self._wake.set()
        await self._asleep.wait()


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    AUTHORITY.configure_trust(context)
    return context


async def serial(port: int, *, name: str = NAME) -> int:
    """Shake hands anew, and return the number of the certificate that was shown."""
    context = trusting()
    context.check_hostname = bool(name)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    shown = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return int(shown, 16)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_pair(AUTHORITY, tmp_path / "tls", NAME)


@contextlib.asynccontextmanager
async def served(files: Files, clock: Ticks) -> AsyncIterator[int]:
    """A port whose one route says how often it was asked on the same connection."""

    async def count(request: web.Request) -> web.Response:
        assert request.transport is not None
        asked = getattr(request.transport, "asked", 0) + 1
        request.transport.asked = asked  # type: ignore[attr-defined]
        return web.Response(text=str(asked))

    app = web.Application()
    app.router.add_get("/", count)
    async with (
        certified(*files, clock=clock) as tls,
        listening(app, host="127.0.0.1", port=0, cancel_abandoned=False, tls=tls) as port,
    ):
        yield port


async def test_a_renewed_certificate_is_shown_to_new_connections_and_open_ones_go_on(files: Files) -> None:
    clock = Ticks()
    async with served(files, clock) as port, ClientSession(f"https://127.0.0.1:{port}") as session:

        async def ask() -> str:
            async with session.get("/", ssl=context, server_hostname=NAME) as answer:
                return await answer.text()

        context = trusting()
        assert await ask() == "1"
        first = await serial(port)
        write_pair(AUTHORITY, files.key.parent, NAME)
        await clock.tick()
        second = await serial(port)
        assert second != first
        assert await serial(port, name="") == second, "a client that names no server sees the same"
        assert await ask() == "2", "the connection of before carries on"


async def test_files_that_do_not_belong_together_change_nothing_until_they_do(files: Files, tmp_path: Path) -> None:
    clock = Ticks()
    other = write_pair(AUTHORITY, tmp_path / "other", NAME)
    async with served(files, clock) as port:
        first = await serial(port)
        put(files.certificate, other.certificate.read_bytes())
        await clock.tick()
        assert await serial(port) == first
        files.key.unlink()
        await clock.tick()
        assert await serial(port) == first
        put(files.key, other.key.read_bytes())
        await clock.tick()
        assert await serial(port) != first


@pytest.mark.parametrize(
    "believing",
    [
        lambda file: Trust(ca_file=file, server_name=NAME).context(),
        lambda file: Access(token_file=None, tls=True, ca_file=file, server_name=NAME).read()[1],
    ],
    ids=["command line", "peer"],
)
async def test_an_intermediate_authority_stands_for_itself(tmp_path: Path, believing: Believing) -> None:
    """Where an issuer's own certificate is signed by another, cert-manager calls the issuer's ``ca.crt``."""
    issuer, authorities = AUTHORITY.create_child_ca(), tmp_path / "ca.crt"
    issuer.cert_pem.write_to_path(authorities)
    async with (
        served(write_pair(issuer, tmp_path / "tls", NAME), Ticks()) as port,
        ClientSession(f"https://127.0.0.1:{port}") as session,
        session.get("/", ssl=believing(authorities), server_hostname=NAME) as answer,
    ):
        assert await answer.text() == "1"


def _encrypted(files: Files) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
    hidden = serialization.BestAvailableEncryption(b"secret")
    put(
        files.key,
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden),
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda files: files.key.unlink(),
        lambda files: put(files.certificate, b"hello"),
        lambda files: put(files.key, trustme.CA().issue_cert(NAME).private_key_pem.bytes()),
        _encrypted,
    ],
    ids=["missing", "garbage", "another key", "encrypted"],
)
def test_files_that_cannot_be_used_are_named_at_start(files: Files, spoil: object) -> None:
    spoil(files)  # type: ignore[operator]
    with pytest.raises(BadRequest, match=str(files.key)):
        Certificate(certificate=files.certificate, key=files.key)


def test_certificate_and_key_belong_together(files: Files) -> None:
    options = ["--upstream", "http://127.0.0.1:9", "--model", "/nowhere", "--insecure"]
    arguments = ["proxy", "--backend", "vllm", *options, "--control-tls-cert", str(files.certificate)]
    error = CliRunner().invoke(command_line, arguments).exception
    assert isinstance(error, BadRequest)
    assert "belong together" in error.message


async def test_the_program_serves_it_and_the_command_line_asks_it(files: Files, tmp_path: Path) -> None:
    model, authorities = tmp_path / "model", tmp_path / "ca.crt"
    model.mkdir()
    AUTHORITY.cert_pem.write_to_path(authorities)
    proxy = Served(
        tmp_path / "pod",
        model,
        command=("proxy", "--backend", "vllm", "--upstream", "http://127.0.0.1:9"),
        options=(
            "--pod-uid",
            "pod-1",
            "--control-tls-cert",
            str(files.certificate),
            "--control-tls-key",
            str(files.key),
        ),
    ).start()
    try:
        url = proxy.control_url.replace("http:", "https:")

        def ask(token: str | None = None, **trust: object) -> EngineState:
            given: dict[str, object] = {"ca_file": authorities, "server_name": NAME} | trust
            return ControlClient(url, token=token, trust=Trust(**given)).get("/state", EngineState)  # type: ignore[arg-type]

        def told_who_asks() -> bool:
            try:
                ask()
            except Unavailable:
                return False
            except Unauthenticated:
                return True
            return False

        async with asyncio.timeout(120):
            while not await asyncio.to_thread(told_who_asks):
                await asyncio.sleep(0.05)
        token = proxy.token_file.read_text().strip()
        assert (await asyncio.to_thread(ask, token)).live is None
        for wrong in ({"ca_file": None}, {"server_name": "other"}, {"server_name": ""}):
            with pytest.raises(Unavailable, match="certificate") as caught:
                await asyncio.to_thread(ask, token, **wrong)
            assert "MODELSWAP_CA_FILE" in caught.value.advice
        variables = {
            "MODELSWAP_URL": url,
            "MODELSWAP_TOKEN_FILE": str(proxy.token_file),
            "MODELSWAP_CA_FILE": str(authorities),
            "MODELSWAP_SERVER_NAME": NAME,
        }
        done = await asyncio.to_thread(CliRunner().invoke, command_line, ["state", "-o", "json"], env=variables)
        assert done.exit_code == 0, done.output
        assert proxy.probe("/livez") == 0, "plain HTTP gets no answer"
    finally:
        proxy.stop()


_KUBECTL = """#!/bin/sh
case "$1" in
create) echo {token} ;;
port-forward) echo "Forwarding from 127.0.0.1:{port} -> 8001"; exec sleep 60 ;;
esac
"""


async def test_the_metrics_say_when_the_certificate_ends_also_after_it_was_renewed(tmp_path: Path) -> None:
    clock, metrics, folder = Ticks(), Metrics(EngineState), tmp_path / "tls"

    def shown() -> float | None:
        labels = {"port": "control"}
        return metrics.registry.get_sample_value("modelswap_certificate_expiry_timestamp_seconds", labels)

    first, second = (datetime(2040, 1, day, tzinfo=UTC) for day in (1, 2))
    files = write_pair(AUTHORITY, folder, NAME, ends=first)
    assert shown() is None, "a port without TLS has none"
    async with certified(*files, clock=clock, expires=metrics.certificate_expires):
        assert shown() == first.timestamp()
        write_pair(AUTHORITY, folder, NAME, ends=second)
        await clock.tick()
        assert shown() == second.timestamp()
        put(files.certificate, b"half of a pair")
        await clock.tick()
        assert shown() == second.timestamp(), "it is that of the certificate that is shown"


async def test_the_plugin_reaches_it_through_a_port_forward(ports: Ports, files: Files, tmp_path: Path) -> None:
    """The program stands for kubectl, which needs a kubelet to forward a port; the port behind it is the real one."""
    app = control_app(
        coordinator=ports.coordinator,
        authenticator=TokenFileAuthenticator(ports.tokens),
        metrics=Metrics(ports.coordinator.state),
        spool=Spool(tmp_path / "more-bodies"),
    )
    async with (
        certified(*files, clock=Ticks()) as tls,
        listening(app, host="127.0.0.1", port=0, cancel_abandoned=False, tls=tls) as port,
    ):
        program = tmp_path / "kubectl"
        program.write_text(_KUBECTL.format(token=TOKEN, port=port))
        program.chmod(0o755)
        kubectl = Kubectl(program=str(program))
        container = {
            "args": ["--allowed-subject=system:serviceaccount:modelswap-system:modelswap"],
            "ports": [{"name": "modelswap-tls", "containerPort": 8001}],
        }
        pod = {"metadata": {"name": "chat-1", "uid": POD}, "spec": {"containers": [container]}}

        def ask() -> EngineState:
            with Engines(kubectl=kubectl, namespace="team", slot="chat").reach(pod) as client:
                return client.get("/state", EngineState)

        assert (await asyncio.to_thread(ask)).live == ports.template
        assert await asyncio.to_thread(_readyz, kubectl, pod) == "ok"
