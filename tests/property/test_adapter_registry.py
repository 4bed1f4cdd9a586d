"""The adapter registry against a model of it that keeps plain sets and lists."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from modelswap_engine.lora.entries import Content, Entry, Limits
from modelswap_engine.lora.registry import Registry
from modelswap_engine.protocol.adapters import AdapterState
from modelswap_engine.protocol.errors import AdapterLimit, AdapterNotFound, InsufficientMemory

SLOTS, SLOT_BYTES, HOST_BYTES, PINS = 3, 100, 200, 2
LIMITS = Limits(slots=SLOTS, slot_bytes=SLOT_BYTES, host_bytes=HOST_BYTES, max_pinned=PINS)
NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
DIGESTS = st.sampled_from(["sha256:" + digit * 64 for digit in "123"])


def content(name: str, digest: str, *, nbytes: int, pinned: bool = False) -> Content:
    return Content(name=name, digest=digest, uri="file:///x", base_digest="", rank=8, nbytes=nbytes, pinned=pinned)


def size(digest: str) -> int:
    return {"1": 20, "2": 45, "3": 70}[digest[-1]]


@dataclass
class Known:
    """What the model knows of one content."""

    content: Content
    users: int = 0
    claims: list[bool] = field(default_factory=list)
    registered: bool = False
    ever: bool = False

    @property
    def pinned(self) -> bool:
        return (self.registered and self.content.pinned) or any(self.claims)


class RegistryMachine(RuleBasedStateMachine):
    staged = Bundle("staged")
    used = Bundle("used")

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.registry = Registry(LIMITS, now=lambda: self.time)
        self.model: dict[str, Known] = {}
        self.names: dict[str, str] = {}
        self.slots: dict[int, str] = {}
        self.recent: list[str] = []  # the last one was used last

    def entry(self, identity: str) -> Entry:
        found = self.registry.find(identity)
        assert found is not None
        return found

    def held(self) -> int:
        return sum(known.content.nbytes for known in self.model.values())

    @rule(target=staged, name=NAMES, digest=DIGESTS, pinned=st.booleans())
    def stage(self, name: str, digest: str, pinned: bool) -> object:
        self.time += 1
        wanted = content(name, digest, nbytes=size(digest), pinned=pinned)
        pins = {k.content.name for i, k in self.model.items() if k.pinned and i != wanted.id} - {name}
        if pinned and len(pins) >= PINS:
            with pytest.raises(AdapterLimit):
                self.registry.stage(wanted)
            return multiple()
        if wanted.id not in self.model and self.held() + wanted.nbytes > HOST_BYTES:
            with pytest.raises(InsufficientMemory):
                self.registry.stage(wanted)
            return multiple()
        entry = self.registry.stage(wanted)
        if wanted.id not in self.model:
            self.model[wanted.id] = Known(wanted)
            self.recent.append(wanted.id)
        self.model[wanted.id].claims.append(pinned)
        assert entry.id == wanted.id
        return wanted

    @rule(wanted=consumes(staged))
    def give_up(self, wanted: Content) -> None:
        self.registry.unstage(self.entry(wanted.id), wanted)
        self.model[wanted.id].claims.remove(wanted.pinned)

    @rule(wanted=consumes(staged))
    def publish(self, wanted: Content) -> None:
        former = self.registry.publish(self.entry(wanted.id), wanted)
        before = self.names.get(wanted.name)
        assert (former.id if former else None) == (before if before != wanted.id else None)
        if before is not None:
            self.model[before].registered = False
        known = self.model[wanted.id]
        known.claims.remove(wanted.pinned)
        known.content, known.registered, known.ever = wanted, True, True
        self.names[wanted.name] = wanted.id

    @rule(name=NAMES)
    def withdraw(self, name: str) -> None:
        if name not in self.names:
            with pytest.raises(AdapterNotFound):
                self.registry.withdraw(name)
            return
        assert self.registry.withdraw(name).id == self.names[name]
        self.model[self.names.pop(name)].registered = False

    @rule(target=used, name=NAMES)
    def acquire(self, name: str) -> object:
        self.time += 1
        if name not in self.names:  # an unregistered adapter never comes back by being asked for
            with pytest.raises(AdapterNotFound):
                self.registry.acquire(name)
            return multiple()
        entry = self.registry.acquire(name)
        assert entry.id == self.names[name]
        self.model[entry.id].users += 1
        self.recent.remove(entry.id)
        self.recent.append(entry.id)
        return entry.id

    @rule(identity=consumes(used))
    def release(self, identity: str) -> None:
        self.registry.release(self.entry(identity))
        self.model[identity].users -= 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.model)))
        if identity in self.slots.values():
            return
        found = self.registry.placement(self.entry(identity))
        gone = self._expected_evictions(identity)
        if gone is None:
            assert found is None
            return
        assert found is not None
        assert [entry.id for entry in found.evict] == gone
        for entry in found.evict:
            self.registry.displace(entry)
        self.slots = {slot: held for slot, held in self.slots.items() if held not in gone}
        assert found.slot not in self.slots
        self.registry.place(self.entry(identity), found.slot)
        self.slots[found.slot] = identity

    def _expected_evictions(self, identity: str) -> list[str] | None:
        """Drained contents first, then the longest unused; stop as soon as there is room in slots and bytes."""
        leaving = [i for i in self.recent if i in self.slots.values()]
        leaving.sort(key=lambda i: bool(self.model[i].registered or self.model[i].claims))
        free = SLOTS - len(self.slots)
        spare = SLOT_BYTES - sum(self.model[i].content.nbytes for i in self.slots.values())
        needed = self.model[identity].content.nbytes
        gone: list[str] = []
        for candidate in leaving:
            if free and spare >= needed:
                break
            known = self.model[candidate]
            if not known.users and not known.pinned:
                gone.append(candidate)
                free, spare = free + 1, spare + known.content.nbytes
        return gone if free and spare >= needed else None

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.model)))
        known = self.model[identity]
        if known.users or known.registered or known.claims:
            with pytest.raises(RuntimeError):
                self.registry.forget(self.entry(identity))
            return
        self.registry.forget(self.entry(identity))
        del self.model[identity]
        self.recent.remove(identity)
        self.slots = {slot: held for slot, held in self.slots.items() if held != identity}

    @rule()
    def lose(self) -> None:
        self.registry.lost()
        self.slots = {}
        for identity in self.model:
            self.registry.restored(self.entry(identity))

    @invariant()
    def agrees(self) -> None:
        registry = self.registry
        assert {entry.id for entry in registry.entries()} == set(self.model)
        assert [entry.id for entry in registry.entries()] == self.recent
        assert {entry.content.name: entry.id for entry in registry.registered()} == self.names
        assert {entry.slot: entry.id for entry in registry.entries() if entry.slot is not None} == self.slots
        assert registry.host_bytes == self.held() <= HOST_BYTES
        assert registry.slot_bytes <= SLOT_BYTES
        assert registry.slots_used == len(self.slots) <= SLOTS
        for identity, known in self.model.items():
            entry = self.entry(identity)
            assert (entry.references, entry.registered, entry.claims) == (
                known.users, known.registered, len(known.claims),
            )  # fmt: skip
            if known.registered:
                state = AdapterState.READY if identity in self.slots.values() else AdapterState.EVICTED
            else:
                state = AdapterState.DRAINING if known.ever else AdapterState.STAGED
            assert entry.state is state


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=60, stateful_step_count=40)


def registry() -> Registry:
    return Registry(LIMITS, now=lambda: 0.0)


def load(into: Registry, wanted: Content) -> Entry:
    entry = into.stage(wanted)
    into.publish(entry, wanted)
    return entry


async def test_waiting_for_the_last_request_ends_with_it() -> None:
    adapters = registry()
    entry = load(adapters, content("a", "sha256:" + "1" * 64, nbytes=10))
    adapters.acquire("a")
    adapters.acquire("a")
    adapters.withdraw("a")
    waiting = asyncio.create_task(adapters.idle(entry))
    adapters.release(entry)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    adapters.abandon(entry)
    assert entry.state is AdapterState.TOMBSTONE
    adapters.release(entry)
    await waiting
    adapters.forget(entry)
    assert adapters.entries() == ()


def test_a_reference_is_given_back_once() -> None:
    adapters = registry()
    entry = load(adapters, content("a", "sha256:" + "1" * 64, nbytes=10))
    adapters.acquire("a")
    adapters.release(entry)
    with pytest.raises(RuntimeError):
        adapters.release(entry)


def test_the_same_content_again_ends_its_draining() -> None:
    adapters = registry()
    wanted = content("a", "sha256:" + "1" * 64, nbytes=10)
    entry = load(adapters, wanted)
    adapters.acquire("a")
    adapters.withdraw("a")
    adapters.abandon(entry)
    again = load(adapters, replace(wanted, pinned=True))
    assert again is entry
    assert (entry.state, entry.pinned) == (AdapterState.EVICTED, True)


def test_what_could_never_fit_is_refused_as_such() -> None:
    with pytest.raises(AdapterLimit):
        registry().stage(content("a", "sha256:" + "1" * 64, nbytes=SLOT_BYTES + 1))
