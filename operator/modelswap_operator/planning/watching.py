"""Sources that can come to hold another content under their name: which pod looks at one again, and when. Pure.

Whatever is found, pods serve on what is pinned: one pod of a slot at rest looks, seldom, and nothing waits for it. A
source that names its content itself is not asked, and one that does not answer says nothing.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from modelswap_engine.protocol.adapters import AdapterSource, AdapterStatus
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.looking import LookRequest, SourceLook, fixed, proven
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.version import LOOKS_SINCE
from modelswap_operator.planning.actions import LookAtSource
from modelswap_operator.planning.adapters import Adapters, is_of, serving
from modelswap_operator.planning.assess import Assessment
from modelswap_operator.planning.backoff import delay
from modelswap_operator.planning.snapshot import Pod, Snapshot, Watched

EVERY: Final = timedelta(minutes=10)
CLEARED: Final = 8
"""So many sets of files that turned out to hold the same are remembered, the latest."""


def watched(snapshot: Snapshot, now: datetime) -> Watched | None:
    """Return what to remember of the source after a look at the slot; None where there is nothing to look at.

    The first look is somewhere in the first ten minutes, another for each slot: an operator that starts asks for all.
    """
    target = Assessment(snapshot).target if snapshot.spec is not None else None
    if target is None or fixed(target.uri):
        return None
    known = _same(snapshot.memory.watched, target.uri, target.digest) or _begun(
        snapshot, target.uri, target.digest, now
    )
    return _at_once(known, now) if snapshot.asked_again else known


def watched_adapters(snapshot: Snapshot, now: datetime) -> dict[str, Watched]:
    """Return the same of each assigned adapter, by name: of its source for the base that is stable."""
    before, found = snapshot.memory.watched_adapters, {}
    again = {a.spec.adapter_name for a in snapshot.adapters if a.asked_again and a.spec is not None}
    for source in _assigned(snapshot):
        known = _same(before.get(source.name), source.uri, source.digest)
        known = known or _begun(snapshot, source.uri, source.digest, now)
        found[source.name] = _at_once(known, now) if source.name in again else known
    return found


def _assigned(snapshot: Snapshot) -> Iterator[AdapterSource]:
    current = snapshot.assignment
    if current is None or current.stable is None or current.owner_uid != snapshot.uid:
        return
    for item in current.adapters:
        source = item.source_for(current.stable.digest)
        if source is not None and not fixed(source.uri):
            yield source


def _same(known: Watched | None, uri: str, digest: str) -> Watched | None:
    return known if known is not None and (known.uri, known.digest) == (uri, digest) else None


def _at_once(known: Watched, now: datetime) -> Watched:
    return replace(known, due=min(known.due, now), again=known.asked)


def _begun(snapshot: Snapshot, uri: str, digest: str, now: datetime) -> Watched:
    share = zlib.crc32(f"{snapshot.uid} {digest}".encode()) / 2**32
    return Watched(uri=uri, digest=digest, due=now + share * EVERY)


def look(a: Assessment, now: datetime) -> LookAtSource | None:
    """Have a pod of a slot at rest look at the source, each time another one: one of them may not reach it."""
    known, target = a.snapshot.memory.watched, a.target
    if known is None or target is None or known.asked or known.due > now or not a.done:
        return None
    able = [pod for pod in a.on_target if _came_from(pod, known)]
    if not able:
        return None
    ref = VersionRef(version=target.version, uri=target.uri, digest=target.digest, credentials=target.credentials)
    return LookAtSource(pod=able[known.looks % len(able)], request=LookRequest(target=ref))


def look_at_adapter(adapters: Adapters, now: datetime) -> LookAtSource | None:
    """Have a pod that serves an adapter look at its source, one adapter after the other: what changed is read whole."""
    a, known = adapters.a, adapters.a.snapshot.memory.watched_adapters
    if not a.done or any(one.asked for one in known.values()):
        return None
    sources = [source for source in _assigned(a.snapshot) if source.name in known and known[source.name].due <= now]
    for source in sorted(sources, key=lambda source: known[source.name].due):
        able = [pod for pod in a.on_target if _looks(pod) and is_of(_served(pod, source.name), source)]
        if able:
            seen = known[source.name]
            ref = VersionRef(version=source.name, uri=source.uri, digest=source.digest, credentials=source.credentials)
            request = LookRequest(target=ref, known=seen.held)
            return LookAtSource(pod=able[seen.looks % len(able)], request=request, adapter=source.name)
    return None


def _served(pod: Pod, name: str) -> AdapterStatus | None:
    return serving(pod.state, name) if pod.state is not None else None


def asked(known: Watched) -> Watched:
    """Return what is known once a pod has been asked to look."""
    return replace(known, asked=True, looks=known.looks + 1)


def answered(
    known: Watched, target: VersionRef, answer: SourceLook | ErrorBody, *, now: datetime, random: float
) -> Watched:
    """Return what is known once it has answered; one that could not tell changes nothing but when the next one is."""
    if _same(known, target.uri, target.digest) is None:
        return known
    if isinstance(answer, SourceLook):
        known, wait = replace(told(known, answer), failures=0), EVERY * (0.8 + 0.4 * random)
    else:
        known = replace(known, failures=known.failures + 1)
        wait = delay(known.failures, random, longest=EVERY.total_seconds())
    return replace(known, asked=False, again=False, due=now if known.again else now + wait)


def told(known: Watched, answer: SourceLook) -> Watched:
    """Return what is known after an answer; the last one holds, but for files that were found to hold the same.

    A file that was written again is another to each pod that resolved the source before, and none to those that did so
    since: without a memory of what these said, the answers of pods that take turns would never agree.
    """
    if answer.found == "":
        same = known.revision != "" and known.revision == answer.revision
        cleared = (*known.cleared, known.revision)[-CLEARED:] if same else known.cleared
        return replace(known, found="", revision="", cleared=cleared, held=answer.revision)
    if proven(answer.found):
        return replace(known, found=answer.found, revision="")
    if answer.revision in known.cleared:
        return replace(known, found="", revision="")
    return replace(known, found=answer.found, revision=answer.revision)


def _came_from(pod: Pod, known: Watched) -> bool:
    """Say whether a pod can look, and has what it serves from there."""
    live = pod.state.live if pod.state is not None else None
    return live is not None and _looks(pod) and (live.uri, live.digest) == (known.uri, known.digest)


def _looks(pod: Pod) -> bool:
    """Say whether a pod's sidecar is known to be able to look at sources."""
    return pod.state is not None and pod.state.protocol_version >= LOOKS_SINCE
