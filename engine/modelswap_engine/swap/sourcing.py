"""Asking sources, within bounds: what is at a place, who vouches for it, and its bytes.

A version that was sent is in the engine. Nothing that has to be signed and is not gets past here.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from modelswap_engine.protocol.errors import NotFound, SignatureInvalid, SignatureMissing, SourceNotFound
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.policy import Verification
from modelswap_engine.protocol.updates import RECEIVED
from modelswap_engine.sources.port import Brought, Resolved, Travelled
from modelswap_engine.swap.core import Core

LOOK_SECONDS: Final = 30.0


async def resolve(core: Core, ref: VersionRef, *, unless: asyncio.Future[None] | None = None) -> Resolved:
    """Find what a reference names, and who vouches for it.

    Raises:
        SignatureMissing, SignatureInvalid, TrustedKeysUnusable: it may not be taken.
        NotReady: the source did not answer in time.
        ModelswapError: of the source.
    """
    if ref.uri.startswith(RECEIVED):
        resolved = find_received(core, ref.uri)
        await vouched(core, resolved, ref.verification)
        return resolved
    resolved = await _ask(core, ref, digest=ref.digest, unless=unless)
    try:
        await vouched(core, resolved, ref.verification)
    except (SignatureMissing, SignatureInvalid):
        if resolved.header_bytes:
            raise
        resolved = await _ask(core, ref, digest="", unless=unless)  # known from before: it may be signed by now
        await vouched(core, resolved, ref.verification)
    return resolved


async def vouched(core: Core, resolved: Resolved, verification: Verification | None) -> str:
    """Return who vouches for a version, "" where nobody needs to.

    Raises:
        SignatureMissing, SignatureInvalid, TrustedKeysUnusable: it may not be taken.
    """
    if not core.signatures.wanted(verification):
        return ""

    async def verify() -> str:
        found: str = await core.offload(core.signatures.check, resolved.evidence, verification)
        return found

    signer: str = await core.bounded("verifying the signature", verify(), core.settings.resolve_seconds)
    return signer


async def _ask(core: Core, ref: VersionRef, *, digest: str, unless: asyncio.Future[None] | None) -> Resolved:
    work = core.sources.resolve(ref.uri, digest=digest, credentials=ref.credentials)
    resolved: Resolved = await core.bounded(
        f"the source of {ref.uri}", work, core.settings.resolve_seconds, unless=unless
    )
    return resolved


async def look(core: Core, ref: VersionRef) -> SourceLook:
    """Look whether the source of the live version still holds it.

    Raises:
        NotFound: the reference is not what is live, or that did not come from there.
        NotReady: the source did not answer in time.
        ModelswapError: of the source.
    """
    live = core.live
    if live is None or (live.ref.uri, live.digest) != (ref.uri, ref.digest):
        raise NotFound(f"{ref.uri[:200]!r} is not where the live version came from", advice="ask another pod")
    seen: SourceLook = await core.bounded(f"the source of {ref.uri}", live.resolved.moved(), LOOK_SECONDS)
    return seen


async def obtain(
    core: Core,
    resolved: Resolved,
    names: Iterable[str],
    *,
    travelled: Travelled | None = None,
    unless: asyncio.Future[None] | None = None,
) -> Brought | None:
    """Bring tensors to this pod; see :meth:`Resolved.obtain`.

    Raises:
        NotReady: they did not come in time.
        ModelswapError: of the source.
    """
    work = resolved.obtain(names, travelled=travelled)
    seconds = core.settings.fetch_seconds
    brought: Brought | None = await core.bounded(f"fetching from {resolved.uri}", work, seconds, unless=unless)
    return brought


def find_received(core: Core, uri: str) -> Resolved:
    """Return a version that was sent to this engine.

    Raises:
        SourceNotFound: it is not here any more.
    """
    known = [held.resolved for held in (core.live, core.previous) if held is not None]
    found = next((item for item in [core.received, *known] if item is not None and item.uri == uri), None)
    if found is None:
        raise SourceNotFound(
            f"{uri[:200]!r} was sent to the engine and is not in its memory any more",
            advice="send the weights again, or swap to a version at a source",
        )
    return found
