"""Which adapters this pod must serve, and who said so: the newest assignment, from a call or from the mounted file.

Assignments are fenced like decisions about the base: an older one, an old leader's and another object's are refused.
What is done about them is ``following``.
"""

from collections.abc import Mapping, Sequence

from modelswap_engine.lora.shelf import log
from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.assignment import AssignedAdapter, Assignment
from modelswap_engine.protocol.errors import BadRequest, ForeignOwner, ModelswapError, NotReady, StaleRevision
from modelswap_engine.protocol.messages import Fence
from modelswap_engine.swap.companion import Base
from modelswap_engine.swap.fence import CLI, Accepted
from modelswap_engine.swap.records import Assigned


class Assignments:
    """The assignment of adapters that was accepted last.

    Args:
        pod_uid: the pod this runs in.

    Attributes:
        adapters: those of this pod, by name, in the order in which they were assigned.
    """

    def __init__(self, *, pod_uid: str) -> None:
        self._pod_uid = pod_uid
        self._base: Base | None = None
        self._told = ""
        self.record: Assigned | None = None
        self.adapters: Mapping[str, AssignedAdapter] = {}

    def attach(self, base: Base) -> None:
        """Learn whose journal and whose file this is about."""
        self._base = base
        self._set(base.assigned)

    def source_for(self, name: str, base_digest: str) -> AdapterSource | None:
        """Return the content that an assigned name has on a base; None also for a name that is not assigned."""
        item = self.adapters.get(name)
        return item.source_for(base_digest) if item is not None else None

    def decision(self, name: str) -> Accepted | None:
        """Return the decision that a call about a name must be newer than, None where it is not assigned."""
        record = self.record
        if record is None or name not in self.adapters:
            return None
        return Accepted(
            owner_uid=record.owner_uid, epoch=record.epoch, revision=record.revision, released=record.released
        )

    def decisions(self) -> dict[str, Accepted]:
        """Return :meth:`decision` for all names that are assigned now."""
        found = {name: self.decision(name) for name in self.adapters}
        return {name: accepted for name, accepted in found.items() if accepted is not None}

    async def accept(self, fence: Fence, adapters: Sequence[AssignedAdapter]) -> None:
        """Take an assignment from a call.

        Raises:
            BadRequest: it names no owner.
            ForeignOwner, StaleRevision: the caller is not entitled.
        """
        if fence.owner_uid in ("", CLI):
            raise BadRequest(
                "an assignment needs the UID of its ModelVersion as owner", advice="load adapters one by one"
            )
        known = self.record
        if known is not None and known.owner_uid != fence.owner_uid and not known.released:
            await self._check_takeover(fence, known)
        elif known is not None and known.owner_uid == fence.owner_uid and (fence.epoch, fence.revision) < known.order:
            raise StaleRevision(
                f"(epoch {fence.epoch}, revision {fence.revision}) is older than the assignment of adapters that is "
                f"followed here (epoch {known.epoch}, revision {known.revision})",
                advice="read the assignment and decide again",
                details={"epoch": str(known.epoch), "revision": str(known.revision)},
            )
        await self._take(
            Assigned(
                owner_uid=fence.owner_uid, epoch=fence.epoch, revision=fence.revision, adapters=self._mine(adapters)
            )
        )

    async def _check_takeover(self, fence: Fence, known: Assigned) -> None:
        """Only the file, which the cluster vouches for, says that another object owns this pod now."""
        file = await self._file()
        if file is None or file.owner_uid != fence.owner_uid or _order(file) <= known.order:
            raise ForeignOwner(
                f"the adapters of this pod are assigned by owner {known.owner_uid!r}, the call comes from "
                f"{fence.owner_uid!r}",
                advice="wait for the mounted assignment to say so, or delete the other ModelVersion",
                details={"owner": known.owner_uid},
            )

    async def adopt(self) -> None:
        """Take what the mounted file says, when that is newer."""
        file = await self._file()
        if file is None or not file.adapters_revision:
            return
        known = self.record
        if known is not None:
            newer = _order(file) > known.order
            same_owner = file.owner_uid == known.owner_uid
            if not newer and not (same_owner and _order(file) == known.order and file.released != known.released):
                return
        await self._take(
            Assigned(
                owner_uid=file.owner_uid,
                epoch=file.epoch,
                revision=file.adapters_revision,
                released=file.released,
                adapters=self._mine(file.adapters),
            )
        )

    async def _file(self) -> Assignment | None:
        try:
            return await self._known_base.assignment()
        except ModelswapError as error:
            if error.message != self._told:
                log.warning("adapters stay as they were assigned last: %s", error.message)
            self._told = error.message
            return None

    async def _take(self, record: Assigned) -> None:
        if record == self.record:
            return
        self._set(record)
        self._known_base.touch()
        await self._known_base.record_owed(record)

    def _set(self, record: Assigned | None) -> None:
        self.record = record
        self.adapters = {item.name: item for item in record.adapters} if record is not None else {}

    def _mine(self, adapters: Sequence[AssignedAdapter]) -> tuple[AssignedAdapter, ...]:
        return tuple(item for item in adapters if item.meant_for(self._pod_uid))

    @property
    def _known_base(self) -> Base:
        if self._base is None:
            raise NotReady("the engine is starting", details={"retryAfterSeconds": "1"})
        return self._base


def _order(file: Assignment) -> tuple[int, int]:
    return (file.epoch, file.adapters_revision)
