"""What the journal holds, and what a list of records means. Pure; the file is ``journal.py``."""

from typing import Final

import msgspec

from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.swap.fence import Accepted

KEPT_OUTCOMES: Final = 64


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


Record = Accepted | Intent | Outcome | Served | Template


class JournalState(msgspec.Struct, frozen=True, kw_only=True):
    """What all records together say. ``outcomes`` is in order, the latest last."""

    accepted: Accepted | None = None
    intent: Intent | None = None
    served: VersionRef | None = None
    template: str = ""
    outcomes: tuple[SwapStatus, ...] = ()

    def outcome(self, operation_id: str) -> SwapStatus | None:
        """Return how an operation ended, or None when it has not, or is forgotten."""
        return next((status for status in reversed(self.outcomes) if status.operation_id == operation_id), None)

    def records(self) -> tuple[Record, ...]:
        """Return the shortest list of records with this meaning."""
        found: list[Record] = [Template(uri=self.template)] if self.template else []
        found += [Outcome(status=status) for status in self.outcomes]
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
        case Outcome():
            operation_id = record.status.operation_id
            others = tuple(status for status in state.outcomes if status.operation_id != operation_id)
            done = state.intent is not None and state.intent.operation_id == operation_id
            kept = (*others, record.status)[-KEPT_OUTCOMES:]
            return replace(state, outcomes=kept, intent=None if done else state.intent)
