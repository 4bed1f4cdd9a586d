"""Where a serving process takes versions from, made of its options: mounted folders, and what it may fetch."""

import os
from dataclasses import dataclass

from modelswap_engine.cli.hosting import HostSettings, Template
from modelswap_engine.cli.sharing import peers_of
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.https import WebFolders
from modelswap_engine.sources.hub import Hubs
from modelswap_engine.sources.objects import SCHEMES, ObjectStores
from modelswap_engine.sources.oci.registries import Registries
from modelswap_engine.sources.registry import Sources
from modelswap_engine.sources.remote.fetch import Fetcher
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.schemes import ByScheme
from modelswap_engine.sources.remote.source import RemoteSource
from modelswap_engine.sources.web.ranges import WebSettings
from modelswap_engine.sources.web.reach import Reach
from modelswap_engine.store.content import ContentStore


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Where versions may come from, and what is kept of them."""

    sources: Sources
    store: ContentStore
    records: Records


def supply_of(settings: HostSettings, *, template: Template) -> Supply:
    """Return where versions may come from, and what is kept of them.

    Raises:
        SourceNotAllowed: an allowed prefix is no URI of a folder.
        SourceUnreadable: the content store cannot be made.
    """
    state = settings.state_dir.resolve()
    files = FileSource(
        roots=[
            *([template.folder] if template.folder is not None else []),
            *(root.resolve() for root in settings.allow_root),
        ],
        cache=state / "manifests",
        claims=dict(settings.claim),
    )
    store = ContentStore(settings.store_dir or state / "store", limit_bytes=settings.store_bytes)
    store.open()
    records = Records(state / "sources")
    elsewhere = _openers(settings)
    remote = RemoteSource(
        elsewhere,
        allowed=Allowed(settings.allow_source, credentials=settings.source_credentials),
        store=store,
        records=records,
        fetcher=Fetcher(store),
        sharing=peers_of(settings),
    )
    sources = Sources({"file": files, "pvc": files, **dict.fromkeys(elsewhere.schemes, remote)})
    return Supply(sources=sources, store=store, records=records)


def _openers(settings: HostSettings) -> ByScheme:
    credentials = Credentials(settings.credentials_dir)
    reach = Reach.of(settings.allow_source, anywhere=settings.allow_private_redirects)
    web = WebSettings(reach=reach)
    return ByScheme(
        {
            **dict.fromkeys(SCHEMES, ObjectStores(credentials)),
            "https": WebFolders(credentials, web),
            "hf": Hubs(credentials, environment=os.environ, settings=web),
            "oci": Registries(credentials, web),
        }
    )
