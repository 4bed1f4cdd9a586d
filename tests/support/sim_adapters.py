"""The LoRA adapters of one simulated pod: what it was told, what it serves, one load or unload with each tick.

A stand-in for tests of the operator's decisions and loops; what a sidecar really does with an assignment is tested
where that is. Contents are a table of what is at each URI: a digest, or why it cannot be served.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from modelswap_engine.protocol.adapter_calls import AssignAdaptersRequest, ResolvedAdapter, ResolvedAdapters
from modelswap_engine.protocol.adapters import (
    AdapterRegistry,
    AdapterSource,
    AdapterState,
    AdapterStatus,
    AssignedProblem,
    AssignedState,
    adapter_id,
)
from modelswap_engine.protocol.assignment import AssignedAdapter, Assignment
from modelswap_engine.protocol.errors import ErrorBody, ForeignOwner, StaleRevision
from modelswap_engine.protocol.looking import LookRequest, SourceLook

NOTHING = ErrorBody(code="SourceNotFound", message="nothing is there", advice="check the URI")

LATE = ErrorBody(code="Unavailable", message="not read within 20 s", retryable=True)


@dataclass
class SimAdapters:
    """See the module. ``room`` is how many the engine can hold; None for an engine that serves none."""

    pod_uid: str
    contents: dict[str, str | ErrorBody]
    room: int | None = 256
    owner_uid: str = ""
    order: tuple[int, int] = (0, 0)
    items: tuple[AssignedAdapter, ...] = ()
    served: dict[str, AdapterSource] = field(default_factory=dict)
    by_hand: dict[str, int] = field(default_factory=dict)
    strangers: set[str] = field(default_factory=set)
    calls: int = 0
    read: int = 0

    def assign(self, request: AssignAdaptersRequest) -> None:
        fence = request.fence
        assert fence.pod_uid == self.pod_uid
        self.calls += 1
        newer = (fence.epoch, fence.revision) > self.order  # and the mounted file says so
        if self.owner_uid not in ("", fence.owner_uid) and not (newer and self.owner_uid.startswith("owner")):
            raise ForeignOwner(f"the adapters here are {self.owner_uid}'s")
        if (fence.epoch, fence.revision) < self.order:
            raise StaleRevision(f"{fence.revision} is older than {self.order}")
        self._take(fence.owner_uid, (fence.epoch, fence.revision), request.adapters)

    def _take(self, owner: str, order: tuple[int, int], adapters: Sequence[AssignedAdapter]) -> None:
        self.owner_uid, self.order = owner, order
        self.items = tuple(item for item in adapters if item.meant_for(self.pod_uid))
        self.by_hand = {name: revision for name, revision in self.by_hand.items() if revision > order[1]}

    def follow(self, file: Assignment) -> None:
        """Read a mounted file, which may be an older one than the operator's last, and is obeyed when it is newer."""
        order = (file.epoch, file.adapters_revision)
        if file.adapters_revision and order > self.order:
            self._take(file.owner_uid, order, file.adapters)

    def overrule(self, name: str, uri: str) -> None:
        """A person loads other content under a name."""
        self.strangers = self.strangers | ({name} - self.served.keys())
        digest = self.contents[uri]
        assert isinstance(digest, str)
        self.served[name] = AdapterSource(name=name, uri=uri, digest=digest)
        self.by_hand[name] = self.order[1] + 1

    def restart(self, assignment: Assignment | None, base: str) -> None:
        """A new process: what it is assigned is there before it serves."""
        self.served = {}
        if assignment is not None and assignment.adapters_revision:
            order = (assignment.epoch, assignment.adapters_revision)
            if self.owner_uid != assignment.owner_uid or order >= self.order:
                self._take(assignment.owner_uid, order, assignment.adapters)
        while self.tick(base):
            pass

    def tick(self, base: str) -> bool:
        """Make one change; says whether there was one to make."""
        for name in sorted(self.served.keys() - {item.name for item in self.items} - self.by_hand.keys()):
            del self.served[name]
            return True
        for item in self.items:
            source = self._wanted(item, base)
            if source is not None and self.served.get(item.name) != source and self._error(item, base) is None:
                self.served[item.name] = source
                self.strangers.discard(item.name)
                return True
        return False

    def _wanted(self, item: AssignedAdapter, base: str) -> AdapterSource | None:
        return None if item.name in self.by_hand else item.source_for(base)

    def _error(self, item: AssignedAdapter, base: str) -> ErrorBody | None:
        source = item.source_for(base)
        if source is not None and self.served.get(item.name) == source:
            return None
        if item.name in self.by_hand:
            return ErrorBody(code="StaleRevision", message=f"{item.name} was decided by hand")
        if source is None:
            return ErrorBody(code="IncompatibleAdapter", message="no source for this base")
        found = self.contents.get(source.uri, NOTHING)
        if isinstance(found, ErrorBody):
            return found
        if found != source.digest:
            return ErrorBody(code="DigestMismatch", message=f"{source.uri} holds {found}")
        if item.name not in self.served and len(self.served) >= (self.room or 0):
            return ErrorBody(code="AdapterLimit", message=f"the engine can hold {self.room}", advice="unload one")
        return None

    def open(self, base: str) -> int:
        gone = self.served.keys() - {item.name for item in self.items} - self.by_hand.keys()
        wrong = [
            i for i in self.items if self._error(i, base) is None and self.served.get(i.name) != i.source_for(base)
        ]
        return len(gone) + len(wrong)

    def resolve(self, sources: Sequence[AdapterSource], *, late: Collection[str] = ()) -> ResolvedAdapters:
        rows = []
        for source in sources:
            found = self.contents.get(source.uri, NOTHING) if source.uri not in late else LATE
            digest, error = (found, None) if isinstance(found, str) else ("", found)
            row = ResolvedAdapter(
                name=source.name, uri=source.uri, base_digest=source.base_digest, digest=digest, error=error
            )
            rows.append(row)
        return ResolvedAdapters(adapters=rows)

    def look(self, request: LookRequest) -> SourceLook | ErrorBody:
        """Say what is at the place of an adapter that is served; ``read`` counts those that were read for it."""
        target = request.target
        assert (self.served[target.version].uri, self.served[target.version].digest) == (target.uri, target.digest)
        found = self.contents.get(target.uri, NOTHING)
        if isinstance(found, ErrorBody):
            return found
        revision = f"files of {found}"
        if revision != request.known:
            self.read += 1
        return SourceLook(found=found if found != target.digest else "", revision=revision)

    def view(self, base: str) -> AdapterRegistry:
        errors = {item.name: self._error(item, base) for item in self.items}
        return AdapterRegistry(
            slots=4 if self.room is not None else 0,
            reason="" if self.room is not None else "the engine was started without slots for adapters",
            adapters=[self._row(source) for source in self.served.values()],
            assigned=AssignedState(
                owner_uid=self.owner_uid,
                epoch=self.order[0],
                revision=self.order[1],
                adapters=len(self.items),
                open=self.open(base),
                problems=[AssignedProblem(name=name, error=error) for name, error in errors.items() if error],
            )
            if self.owner_uid
            else None,
        )

    def _row(self, source: AdapterSource) -> AdapterStatus:
        return AdapterStatus(
            name=source.name,
            id=adapter_id(source.name, source.digest),
            digest=source.digest,
            uri=source.uri,
            base_digest=source.base_digest,
            state=AdapterState.READY,
            owner_uid="cli" if source.name in self.strangers else self.owner_uid,
            revision=self.by_hand.get(source.name, self.order[1]),
        )
