"""An engine's adapters in memory, and adapters at sources in memory: for unit tests of the desk, and nowhere else.

The engine is faithful where the desk depends on it: it knows what it holds and what is in its slots, forgets both when
it loses its memory, and can be told to hang, fail or die.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelswap_engine.backends.adapters import AdapterLayout, LoadAdapter
from modelswap_engine.backends.port import Reply, TensorRange
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.protocol.assignment import Assignment
from modelswap_engine.protocol.errors import ModelswapError, NotFound, SourceNotFound, WorkerLost
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.sources.port import Identity
from modelswap_engine.swap.records import Assigned, Record, Registered
from tests.support import late
from tests.support.adapters import FIELDS, LAYOUT, pair


class FakeHost:
    """See the module.

    Attributes:
        held: adapters in memory.
        slots: adapters in slots, by slot.
        calls: what was asked, in order.
        hang: set, the next calls of these names wait for it to be cleared.
        fail: errors of the next calls, by name.
    """

    def __init__(self, *, slots: int = 2) -> None:
        self.layout = AdapterLayout(slots=slots, max_rank=8, targets=LAYOUT.targets, refused=LAYOUT.refused)
        self.held: set[str] = set()
        self.slots: dict[int, str] = {}
        self.calls: list[str] = []
        self.hanging: dict[str, asyncio.Event] = {}
        self.fail: dict[str, ModelswapError] = {}
        self.alive = True

    def lose(self) -> None:
        self.held, self.slots = set(), {}

    def adapters(self) -> AdapterLayout:
        return self.layout

    async def load_adapter(self, order: LoadAdapter) -> Sequence[Reply]:
        return await self._act("load", order.adapter_id)

    async def place_adapter(self, adapter_id: str, slot: int) -> Sequence[Reply]:
        return await self._act("place", adapter_id, slot)

    async def clear_slot(self, slot: int) -> Sequence[Reply]:
        return await self._act("clear", "", slot)

    async def drop_adapter(self, adapter_id: str) -> Sequence[Reply]:
        return await self._act("drop", adapter_id)

    async def _act(self, name: str, adapter_id: str, slot: int = -1) -> Sequence[Reply]:
        self.calls.append(f"{name} {adapter_id or slot}")
        await late.act()
        if name in self.hanging:
            await self.hanging[name].wait()
        if not self.alive:
            raise WorkerLost("the worker is gone")
        error = self.fail.pop(name, None)
        if name == "place" and adapter_id not in self.held:
            error = NotFound(f"{adapter_id} is not in memory")
        if error is None:
            self._change(name, adapter_id, slot)
        return [Reply(operation_id="", rank=0, boot_id="b", error=error.body() if error is not None else None)]

    def _change(self, name: str, adapter_id: str, slot: int) -> None:
        if name == "load":
            self.held.add(adapter_id)
        elif name == "place":
            self.slots[slot] = adapter_id
        elif name == "clear":
            self.slots.pop(slot, None)
        else:
            self.held.discard(adapter_id)
            self.slots = {number: held for number, held in self.slots.items() if held != adapter_id}


class FakeOpened:
    evidence = None

    def __init__(self, content: str, *, rank: int) -> None:
        self._content = content
        self.hashed = False
        self.revision = f"files of {content}"
        self.config = json.dumps(FIELDS | {"r": rank}).encode()
        self.tensors: Mapping[str, TensorEntry] = {
            name: TensorEntry(name=name, dtype=dtype, shape=shape, nbytes=len(data), file="w", offset=0)
            for name, (dtype, shape, data) in pair(rank=rank).items()
        }

    async def hash(self, identity: Identity | None = None) -> dict[str, str]:
        self.hashed = True
        return {name: hashlib.sha256((name + self._content).encode()).hexdigest() for name in self.tensors}

    def range_of(self, entry: TensorEntry, *, sha256: str) -> TensorRange:
        return TensorRange(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            path="w",
            offset=0,
            nbytes=entry.nbytes,
            sha256=sha256,
        )


class FakeOpener:
    """Adapters by URI: their content is a text."""

    def __init__(self) -> None:
        self.contents: dict[str, str] = {}
        self.ranks: dict[str, int] = {}
        self.errors: dict[str, ModelswapError] = {}
        self.hanging: dict[str, asyncio.Event] = {}
        self.credentials: dict[str, str] = {}
        self.configs: dict[str, bytes] = {}

    def put(self, uri: str, content: str, *, rank: int = 2) -> str:
        self.contents[uri], self.ranks[uri] = content, rank
        return uri

    async def open_adapter(self, uri: str, *, credentials: str = "") -> FakeOpened:
        self.credentials[uri] = credentials
        if uri in self.hanging:
            await self.hanging[uri].wait()
        if uri in self.errors:
            raise self.errors[uri]
        if uri not in self.contents:
            raise SourceNotFound(f"{uri}: nothing is there")
        self.opened = FakeOpened(self.contents[uri], rank=self.ranks[uri])
        self.opened.config = self.configs.get(uri, self.opened.config)
        return self.opened


@dataclass
class FakeBase:
    """The base that adapters live on."""

    live: VersionRef | None = field(default_factory=lambda: VersionRef(version="1.0", digest="sha256:" + "b" * 64))
    stopping: bool = False
    epoch: int = 0
    registrations: dict[str, Registered] = field(default_factory=dict)
    seq: int = 1
    written: list[Any] = field(default_factory=list)
    assigned: Assigned | None = None
    file: Assignment | None = None

    def live_ref(self) -> VersionRef | None:
        return self.live

    @property
    def etag(self) -> str:
        return f'"boot.{self.seq}"'

    def touch(self) -> None:
        self.seq += 1

    async def record_owed(self, *records: Record) -> None:
        for record in records:
            self.written.append(record)
            if isinstance(record, Registered):
                self.registrations[record.name] = record
            if isinstance(record, Assigned):
                self.assigned = record

    async def assignment(self) -> Assignment | None:
        return self.file
