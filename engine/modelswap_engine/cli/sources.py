"""Where a serving process takes versions from, made of its options: mounted folders, and what it may fetch."""

from dataclasses import dataclass

from modelswap_engine.cli.hosting import HostSettings, Template
from modelswap_engine.cli.openers import openers
from modelswap_engine.cli.sharing import peers_of
from modelswap_engine.sources.allowed import Allowed
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.registry import Sources
from modelswap_engine.sources.remote.fetch import Fetcher
from modelswap_engine.sources.remote.records import Records
from modelswap_engine.sources.remote.source import RemoteSource
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
            *(root.absolute() for root in settings.allow_root),  # looked at when asked for: its server may be gone
        ],
        cache=state / "manifests",
        claims=dict(settings.claim),
    )
    store = ContentStore(
        settings.store_dir or state / "store", limit_bytes=settings.store_bytes, shared=settings.store_shared
    )
    store.open()
    records = Records(state / "sources")
    elsewhere = openers(
        credentials_dir=settings.credentials_dir,
        allow=settings.allow_source,
        private_redirects=settings.allow_private_redirects,
    )
    remote = RemoteSource(
        elsewhere,
        allowed=Allowed(settings.allow_source, credentials=settings.source_credentials),
        store=store,
        records=records,
        fetcher=Fetcher(store),
        sharing=peers_of(settings),
        mounted=files.found,
    )
    sources = Sources({"file": files, "pvc": files, **dict.fromkeys(elsewhere.schemes, remote)})
    return Supply(sources=sources, store=store, records=records)
