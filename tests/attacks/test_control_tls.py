"""Every way to be taken for a pod without being it, and to be talked out of TLS, against the operator's own client."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from modelswap_engine.http.tls import Certificate
from modelswap_engine.protocol.messages import VersionRef
from modelswap_operator.effects.engine_client import Address, EngineClient, EngineUnreachable
from modelswap_operator.effects.trust import LOOK_SECONDS, ControlTls, EngineTlsMode, EngineTlsRefused, Trust
from tests.support.fake_sidecar import FakeSidecar
from tests.support.pki import put, write_pair

UID, NAMESPACE, NAME = "uid-1", "team", "modelswap-control.team.svc"
AUTHORITY = trustme.CA()
NOW = datetime.now(UTC)


@dataclass
class Asked:
    """A token for whoever asks, and how often one was asked for."""

    pods: list[str] = field(default_factory=list)

    async def token(self, pod_uid: str) -> str | None:
        self.pods.append(pod_uid)
        return "secret-token"

    def forget(self, pod_uid: str) -> None:
        return None


@dataclass
class World:
    """The operator's client, the file of authorities it believes, and its clock."""

    folder: Path
    mode: ControlTls = ControlTls.REQUIRED
    now: float = 100.0
    tokens: Asked = field(default_factory=Asked)

    def __post_init__(self) -> None:
        self.authorities = self.folder / "ca" / "ca.crt"
        put(self.authorities, AUTHORITY.cert_pem.bytes())

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[EngineClient]:
        file = None if self.mode is ControlTls.DISABLED else self.authorities
        trust = Trust(mode=self.mode, ca_file=file, clock=lambda: self.now)
        await trust.load()
        async with EngineClient(self.tokens, trust=trust) as client:
            yield client


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@contextlib.asynccontextmanager
async def serving(context: ssl.SSLContext | None) -> AsyncIterator[tuple[FakeSidecar, int]]:
    sidecar = FakeSidecar(pod_uid=UID, contents={}, live=VersionRef(version="1.0", digest="sha256:" + "a" * 64))
    port = await sidecar.start("127.0.0.1", 0, tls=context)
    yield sidecar, port
    await sidecar.stop()


@contextlib.asynccontextmanager
async def recording() -> AsyncIterator[tuple[list[bytes], int]]:
    """A server that speaks no TLS and keeps what it is sent."""
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65536))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    yield heard, server.sockets[0].getsockname()[1]
    server.close()


def pair(folder: Path, *, name: str = NAME, authority: trustme.CA = AUTHORITY, **life: datetime) -> ssl.SSLContext:
    files = write_pair(authority, folder / "pair", name, **life)
    return Certificate(certificate=files.certificate, key=files.key).context


def pod(port: int, *, tls: bool = True, namespace: str = NAMESPACE) -> Address:
    return Address(pod="pod-1", uid=UID, ip="127.0.0.1", port=port, namespace=namespace, tls=tls)


async def test_a_pod_that_proves_its_name_is_spoken_to(world: World) -> None:
    async with serving(pair(world.folder)) as (_, port), world.client() as client:
        assert (await client.state(pod(port))).pod_uid == UID


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"authority": trustme.CA()}, "unable to get local issuer|self.signed"),
        ({"name": "modelswap-control.other.svc"}, "not valid for 'modelswap-control.team.svc'"),
        ({"name": "*.team.svc.example"}, "not valid for"),
        ({"name": "127.0.0.1"}, "not valid for"),  # the address at which it is reached proves nothing
        ({"ends": NOW - timedelta(minutes=1), "begins": NOW - timedelta(days=1)}, "expired"),
        ({"begins": NOW + timedelta(hours=1), "ends": NOW + timedelta(days=1)}, "not yet valid"),
    ],
    ids=["authority", "namespace", "wildcard", "address", "expired", "not yet"],
)
async def test_whoever_does_not_prove_it_hears_no_token(world: World, given: dict[str, object], found: str) -> None:
    context = pair(world.folder, **given)  # type: ignore[arg-type]
    async with serving(context) as (sidecar, port), world.client() as client:
        with pytest.raises(EngineTlsRefused, match=found) as caught:
            await client.state(pod(port))
        assert sidecar.calls == []
        assert "pod-1" in caught.value.message
        assert NAME in caught.value.message


async def test_the_name_is_that_of_the_pods_own_namespace(world: World) -> None:
    async with serving(pair(world.folder)) as (_, port), world.client() as client:
        with pytest.raises(EngineTlsRefused, match=r"modelswap-control\.other\.svc"):
            await client.state(pod(port, namespace="other"))


async def test_no_plain_text_is_tried_where_tls_fails(world: World) -> None:
    world.mode = ControlTls.OPTIONAL
    async with recording() as (heard, port), world.client() as client:
        with pytest.raises(EngineTlsRefused):
            await client.state(pod(port))
    assert [first[:1] for first in heard] == [b"\x16"], "a handshake, and nothing else"
    assert b"secret-token" not in b"".join(heard)


@pytest.mark.parametrize(
    ("mode", "tls", "said"),
    [
        (ControlTls.REQUIRED, False, "requires TLS"),
        (ControlTls.DISABLED, True, "knows no authority"),
    ],
)
async def test_a_pod_of_the_wrong_kind_is_not_even_called(world: World, mode: ControlTls, tls: bool, said: str) -> None:
    world.mode = mode
    async with recording() as (heard, port), world.client() as client:
        with pytest.raises(EngineTlsMode, match=said):
            await client.state(pod(port, tls=tls))
    assert (heard, world.tokens.pods) == ([], [])


async def test_both_kinds_are_served_while_tls_is_optional(world: World) -> None:
    world.mode = ControlTls.OPTIONAL
    async with (
        serving(pair(world.folder)) as (_, secure),
        serving(None) as (_, plain),
        world.client() as client,
    ):
        assert (await client.state(pod(secure))).pod_uid == UID
        assert (await client.state(pod(plain, tls=False))).pod_uid == UID


async def test_authorities_change_without_a_restart(world: World) -> None:
    other = trustme.CA()
    async with (
        serving(pair(world.folder)) as (_, old),
        serving(pair(world.folder / "other", authority=other)) as (_, new),
        world.client() as client,
    ):
        await client.state(pod(old))
        put(world.authorities, other.cert_pem.bytes())
        with pytest.raises(EngineTlsRefused):
            await client.state(pod(new))
        world.now += LOOK_SECONDS
        assert (await client.state(pod(new))).pod_uid == UID
        with pytest.raises(EngineTlsRefused):  # on a new connection: the old one is not used any more
            await client.state(pod(old))
        for broken in (b"", b"not a certificate"):
            put(world.authorities, broken)
            world.now += LOOK_SECONDS
            assert (await client.state(pod(new))).pod_uid == UID


async def test_a_plain_client_gets_nothing_from_a_port_with_tls(world: World) -> None:
    world.mode = ControlTls.OPTIONAL
    async with serving(pair(world.folder)) as (sidecar, port), world.client() as client:
        with pytest.raises(EngineUnreachable):
            await client.state(pod(port, tls=False))
        assert sidecar.calls == []
        assert (await client.state(pod(port))).pod_uid == UID


async def test_when_the_last_authority_ends_is_told_whenever_there_are_others(world: World) -> None:
    told: list[float] = []
    trust = Trust(mode=ControlTls.REQUIRED, ca_file=world.authorities, clock=lambda: world.now, expires=told.append)
    await trust.load()
    pems = [AUTHORITY.cert_pem.bytes(), trustme.CA().cert_pem.bytes()]
    ends = [x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp() for pem in pems]
    put(world.authorities, b"".join(pems))
    world.now += 10
    await trust.channel("pod-1", namespace=NAMESPACE, tls=True)
    await trust.channel("pod-1", namespace=NAMESPACE, tls=True)
    assert told == [ends[0], max(ends)]


async def test_old_versions_of_tls_are_refused_by_both_sides(world: World) -> None:
    context = pair(world.folder)
    trust = Trust(mode=ControlTls.REQUIRED, ca_file=world.authorities, clock=lambda: 0.0)
    channel = await trust.channel("pod-1", namespace=NAMESPACE, tls=True)
    assert isinstance(channel.context, ssl.SSLContext)
    for side in (context, channel.context):
        assert side.minimum_version is ssl.TLSVersion.TLSv1_2
    assert (channel.context.verify_mode, channel.context.check_hostname) == (ssl.CERT_REQUIRED, True)
