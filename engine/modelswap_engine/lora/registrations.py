"""Who decided about each adapter's name, and where its content is for which base; remembered over a restart.

Decisions are fenced like those about the base, each name for itself: another object's, an older one and an old leader's
are refused, also about a name that was unloaded since.
"""

from collections.abc import Iterator, Mapping

import msgspec

from modelswap_engine.lora.terms import OnTerms
from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.errors import NotReady, StaleRevision
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.swap import fence as fences
from modelswap_engine.swap.companion import Base
from modelswap_engine.swap.fence import Accepted
from modelswap_engine.swap.records import Registered


class Registrations(Mapping[str, Registered]):
    """What is registered, by name.

    Args:
        pod_uid: the pod this runs in.
    """

    def __init__(self, *, pod_uid: str) -> None:
        self._pod_uid = pod_uid
        self._names: dict[str, Registered] = {}
        self._base: Base | None = None

    def attach(self, base: Base) -> None:
        """Learn which base this is about, and what its journal remembers."""
        self._base = base
        self._names = dict(base.registrations)

    @property
    def base(self) -> Base:
        """The base that adapters live on.

        Raises:
            NotReady: there is none yet.
        """
        if self._base is None:
            raise NotReady("the engine is starting", details={"retryAfterSeconds": "1"})
        return self._base

    def __getitem__(self, name: str) -> Registered:
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def check_call(self, fence: Fence, if_match: str | None) -> None:
        """Refuse a call that is not meant for this pod, this state or this leader.

        Raises:
            Fenced: see the message.
            NotReady: the engine is stopping.
        """
        base = self.base
        fences.check_pod(fence, self._pod_uid)
        fences.check_match(if_match, base.etag)
        if base.stopping:
            raise NotReady("the engine is stopping", advice="try another replica")
        if fence.owner_uid != fences.CLI and fence.epoch < base.epoch:
            raise StaleRevision(
                f"epoch {fence.epoch} is that of an old leader; the last one obeyed here has {base.epoch}",
                advice="a new leader has taken over; leave it to that one",
                details={"epoch": str(base.epoch)},
            )

    def check_order(self, fence: Fence, target: VersionRef, *, assigned: Accepted | None = None) -> None:
        """Refuse a decision about a name (``target.version``) that is older than the last one, or another owner's.

        The last one is what was decided about the name alone, or the assignment that names it, whichever is newer.

        Raises:
            ForeignOwner, StaleRevision: it is.
        """
        fences.check_order(fence, self._last(target.version, assigned), target=target)

    def _last(self, name: str, assigned: Accepted | None) -> Accepted | None:
        known = self.get(name)
        accepted = known.accepted if known is not None else None
        if assigned is not None and (accepted is None or accepted.order <= assigned.order):
            return assigned
        return accepted

    async def decided(self, fence: Fence, target: VersionRef, source: OnTerms | None, *, operation_id: str) -> None:
        """Remember a decision about a name; without a source it belongs to nobody any more."""
        known = self.get(target.version)
        accepted = fences.accept(
            fence, known.accepted if known is not None else None, operation_id=operation_id, target=target
        )
        if source is None:
            sources: tuple[AdapterSource, ...] = ()
            accepted = msgspec.structs.replace(accepted, released=True)
        elif source.base_digest and known is not None:
            sources = (source, *(other for other in known.sources if other.base_digest != source.base_digest))
        else:
            sources = (source,)
        await self._record(Registered(name=target.version, accepted=accepted, sources=sources))

    async def came_with_base(self, source: OnTerms, *, bases: set[str], assigned: Accepted | None) -> None:
        """Remember a content that comes with a base, beside those of the other bases that may come back.

        ``assigned`` is the assignment that named it when it was chosen: its owner takes the name away again.
        """
        known = self.get(source.name)
        kept = [
            other
            for other in (known.sources if known is not None else ())
            if other.base_digest != source.base_digest and other.base_digest in {"", *bases}
        ]
        accepted = self._last(source.name, assigned) or Accepted()
        await self._record(Registered(name=source.name, accepted=accepted, sources=(source, *kept)))

    async def put_back(self, name: str, before: Registered | None, *, unless: Registered) -> None:
        """Forget what :meth:`came_with_base` remembered ahead of a swap that failed, unless somebody decided since."""
        if self.get(name) is unless:
            await self._record(before or Registered(name=name, accepted=Accepted()))

    async def _record(self, record: Registered) -> None:
        self._names.pop(record.name, None)
        self._names[record.name] = record
        self.base.touch()
        await self.base.record_owed(record)
