"""Collecting what a plan is decided on: the target's manifest and side files, the engine's groups and memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from modelswap_engine.protocol.errors import NotReady
from modelswap_engine.protocol.messages import PlanRequest, VersionRef
from modelswap_engine.swap import sourcing
from modelswap_engine.swap.core import Core
from modelswap_engine.swap.plan import Decision, Situation, decide
from modelswap_engine.swap.trainer.received import Received
from modelswap_engine.swap.versions import Version


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """A decision about a target version; ``header_bytes`` is what had to be read to come to it."""

    version: Version
    decision: Decision
    header_bytes: int


@asynccontextmanager
async def assess(
    core: Core, request: PlanRequest, *, unless: asyncio.Future[None] | None = None
) -> AsyncIterator[Assessment]:
    """Decide about a request; the target's side files stay in place while the context lasts.

    Raises:
        NotReady: nothing is live that a target could be compared with.
        ModelswapError: of the source.
    """
    if core.live is None:
        raise NotReady("no version is live in this engine yet, so there is nothing to compare with", advice="try later")
    known = _known(core, request.target)
    resolved = known.resolved if known is not None else await sourcing.resolve(core, request.target, unless=unless)
    # Also of what is here: it may have been taken before anybody asked for a signature.
    signer = await sourcing.vouched(core, resolved, request.target.verification)
    with core.store.pin(resolved.manifest.digest):
        version = known or await core.bounded(
            "copying side files",
            core.store.materialise(resolved, asked=request.target),
            core.settings.stage_seconds,
            unless=unless,
        )
        decision = await _decide(core, request, version, signer=signer)
        yield Assessment(
            version=version, decision=decision, header_bytes=0 if known is not None else resolved.header_bytes
        )


def _known(core: Core, target: VersionRef) -> Version | None:
    """Return the live or retained version when it is the pinned one, under its new name; no source is asked.

    Another URI is asked first whether it holds that content: it is where the version is loaded from after a loss.
    """
    for held in (core.live, core.previous):
        if held is not None and held.digest == target.digest and target.uri in ("", held.ref.uri):
            ref = msgspec.structs.replace(
                held.ref, version=target.version or held.ref.version, verification=target.verification
            )
            return Version(ref=ref, resolved=held.resolved, directory=held.directory)
    return None


async def _decide(core: Core, request: PlanRequest, version: Version, *, signer: str) -> Decision:
    live = core.live
    if live is None:
        raise NotReady("the live version was lost while the plan was made", advice="try again")
    capabilities = core.backend.capabilities()
    return decide(
        Situation(
            live=live.ref,
            live_manifest=live.manifest,
            target_manifest=version.manifest,
            groups=core.engine.groups(),
            tied=core.engine.tied(),
            side=await core.store.compare(live, version, kind=capabilities.kind),
            previous=core.previous.digest if core.previous is not None else "",
            memory=core.memory.state,
            capabilities=capabilities,
            adapters=await core.companion.assess(request.adapters, target=version.ref),
            reserve=core.settings.memory_reserve,
            resident=version.resolved.held if isinstance(version.resolved, Received) else frozenset(),
            drifted=frozenset(core.drift.names),
            previous_limit=core.settings.previous_bytes,
            replicas=core.engine.replicas,
            signer=signer,
        ),
        request,
    )
