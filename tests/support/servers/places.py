"""One folder of files on each kind of server, opened through a proxy as the engine opens it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.https import WebFolders
from modelswap_engine.sources.hub import Hubs
from modelswap_engine.sources.oci.registries import Registries
from modelswap_engine.sources.remote.port import Folder, Opener
from modelswap_engine.sources.web.ranges import WebSettings
from modelswap_engine.sources.web.reach import Reach
from tests.support.servers.fixtures import Proxied, patience
from tests.support.servers.hub import TOKEN, Hub
from tests.support.servers.proxy import FaultProxy
from tests.support.servers.registry import Layer, RegistryServer
from tests.support.servers.web import WebServer

NAMED = "reader"
"""The name of the mounted credentials."""
_numbers = itertools.count(1)


@dataclass(kw_only=True)
class Place:
    """Where one version lies.

    Attributes:
        proxy: what all weights come through.
        pauses: seconds that were waited before something was asked again.
    """

    proxy: FaultProxy
    mounted: Path
    pauses: list[float] = field(default_factory=list)
    settings: WebSettings = field(init=False)

    def __post_init__(self) -> None:
        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        # The other host that the hub sends to is allowed by its name, as an allowed prefix would.
        reach = Reach(frozenset({"localhost"}))
        self.settings = WebSettings(reach=reach, stall=60.0, sleep=sleep, chance=lambda: 0.0)

    def mount(self, **values: str) -> None:
        """Put keys into the Secret."""
        folder = self.mounted / NAMED
        folder.mkdir(parents=True, exist_ok=True)
        for key, value in values.items():
            (folder / key).write_text(value)

    @property
    def credentials(self) -> Credentials:
        """What is mounted."""
        return Credentials(self.mounted)

    @property
    def opener(self) -> Opener:
        raise NotImplementedError

    @property
    def uri(self) -> str:
        raise NotImplementedError

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Let exactly these be the files of the version."""
        raise NotImplementedError

    async def open(self) -> Folder:
        return await self.opener.open(self.uri, credentials=NAMED)


@dataclass(kw_only=True)
class WebPlace(Place):
    """A folder of the web server."""

    root: Path
    name: str = field(default_factory=lambda: f"chat-{next(_numbers)}")

    @property
    def opener(self) -> Opener:
        return WebFolders(self.credentials, self.settings)

    @property
    def uri(self) -> str:
        return f"{self.proxy.url}/{self.name}"

    async def upload(self, files: Mapping[str, bytes]) -> None:
        folder = self.root / self.name
        folder.mkdir(exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
            # nginx makes ETags of sizes and whole seconds, which two uploads of a test share.
            os.utime(folder / name, (now := 1_700_000_000 + next(_numbers), now))


@dataclass(kw_only=True)
class RegistryPlace(Place):
    """An artifact of the registry."""

    registry: RegistryServer
    name: str = field(default_factory=lambda: f"org/chat-{next(_numbers)}")

    @property
    def opener(self) -> Opener:
        return Registries(self.credentials, self.settings)

    @property
    def uri(self) -> str:
        return f"oci://{self.proxy.host}/{self.name}:1.0"

    async def upload(self, files: Mapping[str, bytes]) -> None:
        layers = [Layer(content=data, annotations={"org.cncf.model.filepath": name}) for name, data in files.items()]
        await self.registry.push(self.name, "1.0", layers, artifact_type="application/vnd.cncf.model.manifest.v1+json")


@dataclass(kw_only=True)
class HubPlace(Place):
    """A repository of the hub; the proxy is before the host that hands out big files."""

    hub: Hub
    name: str = field(default_factory=lambda: f"org/chat-{next(_numbers)}")

    @property
    def opener(self) -> Opener:
        return Hubs(self.credentials, environment={}, settings=self.settings)

    @property
    def uri(self) -> str:
        return f"hf://{self.name}"

    async def upload(self, files: Mapping[str, bytes]) -> None:
        self.hub.commit(self.name, files)


@pytest.fixture
def web_place(web_server: WebServer, proxied: Proxied, tmp_path: Path) -> WebPlace:
    proxy = proxied(web_server.plain_url, tls=web_server.tls)
    place = WebPlace(proxy=proxy, mounted=tmp_path / "mounted", root=web_server.root)
    place.mount(**{"ca.crt": web_server.ca.read_text()})
    return place


@pytest.fixture
def registry_place(
    web_server: WebServer, registry_server: RegistryServer, proxied: Proxied, tmp_path: Path
) -> RegistryPlace:
    proxy = proxied(registry_server.url, tls=web_server.tls)
    place = RegistryPlace(proxy=proxy, mounted=tmp_path / "mounted", registry=registry_server)
    place.mount(**{"ca.crt": web_server.ca.read_text()})
    return place


@pytest.fixture
def hub_place(hub: Hub, proxied: Proxied, tmp_path: Path) -> Iterator[HubPlace]:
    before = hub.cdn_url
    proxy = proxied(before.replace("localhost", "127.0.0.1"))
    hub.cdn_url = proxy.url.replace("127.0.0.1", "localhost")
    place = HubPlace(proxy=proxy, mounted=tmp_path / "mounted", hub=hub)
    place.mount(HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    yield place
    hub.cdn_url = before


@pytest.fixture(params=["web_place", "registry_place", "hub_place"])
def place(request: pytest.FixtureRequest) -> Place:
    """Each of them in turn."""
    found: Place = request.getfixturevalue(request.param)
    found.settings = replace(found.settings, stall=patience(request))
    return found


def elsewhere(place: Place, reach: Reach) -> None:
    """Let what the servers send to be looked at by other rules."""
    place.settings = replace(place.settings, reach=reach)
