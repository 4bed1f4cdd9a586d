"""What the journal holds, and what a list of records means. Pure; the file is ``journal.py``."""

from typing import Final

import msgspec

from modelswap_engine.protocol.adapters import AdapterSource
from modelswap_engine.protocol.assignment import AssignedAdapter
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.swap.fence import Accepted

KEPT_OUTCOMES: Final = 64
KEPT_REMOVED: Final = 256


class Intent(msgspec.Struct, frozen=True, kw_only=True, tag="intent"):
    """All ranks hold ``target`` staged and proved; the next step makes it live."""

    operation_id: str
    source: VersionRef
    target: VersionRef


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """How an operation ended; the answer to its id for as long as it is kept."""

    status: SwapStatus


class Served(msgspec.Struct, frozen=True, kw_only=True, tag="served"):
    """This version is live, proved and open to traffic."""

    version: VersionRef


class Template(msgspec.Struct, frozen=True, kw_only=True, tag="template"):
    """The model that the process was started with."""

    uri: str


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag="adapter"):
    """The last decision about an adapter's name, and where its content is, by base; no sources: it was unloaded."""

    name: str
    accepted: Accepted
    sources: tuple[AdapterSource, ...] = ()

    def source_for(self, base_digest: str) -> AdapterSource | None:
        """Return the content for a base: the one that is bound to it, else the one that is bound to none."""
        found = {source.base_digest: source for source in self.sources}
        return found.get(base_digest) or found.get("")


class Assigned(msgspec.Struct, frozen=True, kw_only=True, tag="assigned"):
    """The last assignment of adapters that was accepted: what of it is this pod's."""

    owner_uid: str
    epoch: int
    revision: int
    released: bool = False
    adapters: tuple[AssignedAdapter, ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        """What assignments of one owner are ordered by."""
        return (self.epoch, self.revision)


Record = Accepted | Intent | Outcome | Served | Template | Registered | Assigned


class JournalState(msgspec.Struct, frozen=True, kw_only=True):
    """What all records together say. ``outcomes`` is in order, the latest last."""

    accepted: Accepted | None = None
    intent: Intent | None = None
    served: VersionRef | None = None
    template: str = ""
    outcomes: tuple[SwapStatus, ...] = ()
    adapters: dict[str, Registered] = {}
    assigned: Assigned | None = None

    def outcome(self, operation_id: str) -> SwapStatus | None:
        """Return how an operation ended, or None when it has not, or is forgotten."""
        return next((status for status in reversed(self.outcomes) if status.operation_id == operation_id), None)

    def records(self) -> tuple[Record, ...]:
        """Return the shortest list of records with this meaning."""
        found: list[Record] = [Template(uri=self.template)] if self.template else []
        found += [Outcome(status=status) for status in self.outcomes]
        found += self.adapters.values()
        found += [self.assigned] if self.assigned is not None else []
        found += [self.accepted] if self.accepted is not None else []
        found += [Served(version=self.served)] if self.served is not None else []
        return (*found, self.intent) if self.intent is not None else tuple(found)


def fold(state: JournalState, record: Record) -> JournalState:
    """Return what is known after one more record."""
    replace = msgspec.structs.replace
    match record:
        case Accepted():
            return replace(state, accepted=record)
        case Intent():
            return replace(state, intent=record)
        case Served():
            # What was in doubt is decided; an intent that became true still tells which operation it was, to its end.
            confirmed = state.intent is not None and state.intent.target == record.version
            return replace(state, served=record.version, intent=state.intent if confirmed else None)
        case Template():
            return replace(state, template=record.uri)
        case Registered():
            return replace(state, adapters=_registered(state.adapters, record))
        case Assigned():
            return replace(state, assigned=record)
        case Outcome():
            operation_id = record.status.operation_id
            others = tuple(status for status in state.outcomes if status.operation_id != operation_id)
            done = state.intent is not None and state.intent.operation_id == operation_id
            kept = (*others, record.status)[-KEPT_OUTCOMES:]
            return replace(state, outcomes=kept, intent=None if done else state.intent)


def _registered(known: dict[str, Registered], record: Registered) -> dict[str, Registered]:
    """Return the names with one more decision, the latest last; of removed names only the latest are kept."""
    found = {name: item for name, item in known.items() if name != record.name} | {record.name: record}
    removed = [name for name, item in found.items() if not item.sources]
    for name in removed[: max(0, len(removed) - KEPT_REMOVED)]:
        del found[name]
    return found
