"""From a source to what the engine is told: an adapter found, checked, hashed and held against its pins.

Everything that can be known without the engine is known before it is asked for anything. Knows no registry.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from modelswap_engine.backends.adapters import AdapterLayout, LoadAdapter
from modelswap_engine.checkpoint.manifest import Manifest
from modelswap_engine.lora.config import AdapterConfig, parse_config
from modelswap_engine.lora.digest import adapter_digest
from modelswap_engine.lora.entries import Content
from modelswap_engine.lora.fit import Fit, fit
from modelswap_engine.lora.terms import OnTerms
from modelswap_engine.lora.vouching import Vouching, check_hashes
from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.errors import DigestMismatch, Internal, Refused
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.sources.adapter import CONFIG_FILE, WEIGHTS_FILE
from modelswap_engine.sources.port import Identity, OpenedAdapter, others

Reader = Callable[[OnTerms, str], Coroutine[Any, Any, "Read"]]
"""Reads an adapter for an operation, or raises what is wrong with it."""


class Opener(Protocol):
    """Whatever finds adapters by URI."""

    async def open_adapter(self, uri: str, *, credentials: str = "") -> OpenedAdapter:
        """Find the adapter at a URI; see :class:`sources.port.Source`."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """An adapter that fits the base by its headers; its bytes are not known yet, but by ``signed`` where it is."""

    source: AdapterSource
    opened: OpenedAdapter
    config: AdapterConfig
    fit: Fit
    signed: Manifest | None


@dataclass(frozen=True, kw_only=True)
class Read:
    """An adapter with its identity, and the order that brings it into the engine."""

    content: Content
    order: LoadAdapter


async def open_fitting(opener: Opener, source: OnTerms, layout: AdapterLayout, *, vouching: Vouching) -> Fitting:
    """Find an adapter, ask who vouches for it, and hold its headers against the base.

    Raises:
        ModelswapError: there is none, or it cannot be served here.
    """
    opened = await opener.open_adapter(source.uri, credentials=source.credentials)
    signed = await vouching.manifest_of(opened, source)
    config = parse_config(opened.config)
    fitted = fit(source.name, config, opened.tensors, layout)
    return Fitting(source=source, opened=opened, config=config, fit=fitted, signed=signed)


async def read(fitting: Fitting, *, operation_id: str) -> Read:
    """Hash an adapter and hold it against what was signed, and its pin.

    Raises:
        DigestMismatch, ManifestMismatch: the source holds something else.
        SourceChanged, SourceUnreadable: not now.
    """
    source, opened = fitting.source, fitting.opened
    identity = Identity(of=partial(adapter_digest, fitting.config, opened.tensors), pinned=source.digest)
    hashes = await opened.hash(identity)
    if fitting.signed is not None:
        check_hashes(fitting.signed, hashes)
    digest = identity.of(hashes)
    if source.digest and source.digest != digest:
        raise DigestMismatch(
            f"adapter {source.name}: {source.uri} holds {digest}, pinned is {source.digest}",
            advice="correct the pin, or put the pinned content back at the source",
            details={"expected": source.digest, "actual": digest},
        )
    content = Content(
        name=source.name,
        digest=digest,
        uri=source.uri,
        base_digest=source.base_digest,
        rank=fitting.fit.rank,
        nbytes=fitting.fit.nbytes,
        pinned=source.pinned,
    )
    order = LoadAdapter(
        operation_id=operation_id,
        adapter_id=content.id,
        digest=digest,
        config=opened.config.decode(),
        modules=tuple(
            pair.module(lambda entry: opened.range_of(entry, sha256=hashes[entry.name])) for pair in fitting.fit.pairs
        ),
    )
    return Read(content=content, order=order)


async def look(opener: Opener, ref: VersionRef, *, known: str) -> SourceLook:
    """Say whether an adapter's place still holds it; bytes are read unless its files are those named ``known``.

    Raises:
        ModelswapError: it cannot be told now, or nothing is there.
    """
    opened = await opener.open_adapter(ref.uri, credentials=ref.credentials)
    if known and opened.revision == known:
        return SourceLook(revision=known)
    try:
        found = adapter_digest(parse_config(opened.config), opened.tensors, await opened.hash())
    except Refused:  # what was served could be read, so this is another
        return SourceLook(found=others([CONFIG_FILE, WEIGHTS_FILE]), revision=opened.revision)
    return SourceLook(found=found if found != ref.digest else "", revision=opened.revision)


def defect(name: str, error: Exception) -> Internal:
    """Return the typed form of an error that only a defect of ours can raise while an adapter is brought in."""
    return Internal(
        f"adapter {name} could not be loaded: {type(error).__name__} in the engine",
        advice="report it with the engine's log; what is assigned is tried again",
        details={"adapter": name},
    )
