"""Sources that can come to hold another content under their name: which pod looks at one again, and when. Pure.

Whatever is found, pods serve on what is pinned: one pod of a slot at rest looks, seldom, and nothing waits for it. A
source that names its content itself is not asked, and one that does not answer says nothing.
"""

import zlib
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from modelswap_engine.protocol.looking import LookRequest, SourceLook, fixed, proven
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.protocol.version import LOOKS_SINCE
from modelswap_operator.planning.actions import LookAtSource
from modelswap_operator.planning.assess import Assessment
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
    known = snapshot.memory.watched
    if known is None or (known.uri, known.digest) != (target.uri, target.digest):
        share = zlib.crc32(f"{snapshot.uid} {target.digest}".encode()) / 2**32
        known = Watched(uri=target.uri, digest=target.digest, due=now + share * EVERY)
    return replace(known, due=min(known.due, now)) if snapshot.asked_again else known


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


def told(known: Watched, answer: SourceLook) -> Watched:
    """Return what is known after an answer; the last one holds, but for files that were found to hold the same.

    A file that was written again is another to each pod that resolved the source before, and none to those that did so
    since: without a memory of what these said, the answers of pods that take turns would never agree.
    """
    if answer.found == "":
        same = known.revision != "" and known.revision == answer.revision
        cleared = (*known.cleared, known.revision)[-CLEARED:] if same else known.cleared
        return replace(known, found="", revision="", cleared=cleared)
    if proven(answer.found):
        return replace(known, found=answer.found, revision="")
    if answer.revision in known.cleared:
        return replace(known, found="", revision="")
    return replace(known, found=answer.found, revision=answer.revision)


def _came_from(pod: Pod, known: Watched) -> bool:
    """Say whether a pod can look, and has what it serves from there."""
    state = pod.state
    if state is None or state.live is None or state.protocol_version < LOOKS_SINCE:
        return False
    return (state.live.uri, state.live.digest) == (known.uri, known.digest)
