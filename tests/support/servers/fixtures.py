"""The servers as fixtures: each is started once per run where a test asks for it; a proxy is each test's own."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from typing import Protocol

import pytest

from tests.support.servers.azure import AzureServer
from tests.support.servers.faults import Stalled
from tests.support.servers.google import GoogleServer
from tests.support.servers.hub import Hub
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.registry import RegistryServer
from tests.support.servers.s3 import S3Server
from tests.support.servers.stores import ObjectServer
from tests.support.servers.web import WebServer


def patience(request: pytest.FixtureRequest) -> float:
    """Return for how many seconds a client of this test waits for a byte: not long only where its fault is silence.

    Else what a busy machine is slow at would be taken for a fault, asked again, and counted.
    """
    row = getattr(request.node, "callspec", None)
    return 1.0 if row is not None and isinstance(row.params.get("fault"), Stalled) else 60.0


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server: make buckets of your own."""
    with contextlib.closing(S3Server(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture(scope="session")
def google_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleServer]:
    """One server of Google's protocol: make buckets of your own."""
    with contextlib.closing(GoogleServer(tmp_path_factory.mktemp("google"))) as server:
        yield server


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """One server of Azure's protocol: make containers of your own."""
    with contextlib.closing(AzureServer(tmp_path_factory.mktemp("azure"))) as server:
        yield server


@pytest.fixture
def object_server(request: pytest.FixtureRequest) -> ObjectServer:
    """A server of objects: S3's, or each in turn for tests that are marked `EVERYWHERE`."""
    found: ObjectServer = request.getfixturevalue(getattr(request, "param", "s3_server"))
    return found


@pytest.fixture(scope="session")
def registry_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """One open OCI registry: push to repositories of your own."""
    with contextlib.closing(RegistryServer(tmp_path_factory.mktemp("registry"))) as server:
        yield server


@pytest.fixture(scope="session")
def web_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """One web server: make folders of your own below its root."""
    with contextlib.closing(WebServer(tmp_path_factory.mktemp("web"))) as server:
        yield server


@pytest.fixture(scope="session")
def hub() -> Iterator[Hub]:
    """One hub: commit to repositories of your own."""
    with contextlib.closing(Hub()) as server:
        yield server


class Proxied(Protocol):
    """Puts a proxy before a server's address."""

    def __call__(self, upstream: str, *, tls: ssl.SSLContext | None = None) -> FaultProxy: ...


@pytest.fixture
def proxied() -> Iterator[Proxied]:
    """Makes proxies that count, and do wrong on request; stopped with the test."""
    with contextlib.ExitStack() as running:

        def start(upstream: str, *, tls: ssl.SSLContext | None = None) -> FaultProxy:
            return running.enter_context(contextlib.closing(FaultProxy(upstream, tls=tls)))

        yield start
