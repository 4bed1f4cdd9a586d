"""A slot whose pods serve LoRA adapters, in one process and in no time: `slot_world` with LoRAAdapter objects."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_operator.api.loraadapter import LoRAAdapterSpec, LoRAAdapterStatus, ModelRef, Placement, SourceSpec
from modelswap_operator.planning.actions import Action, Wait
from modelswap_operator.planning.adapter_services import concerned, wanted_services
from modelswap_operator.planning.snapshot import Adapter
from modelswap_operator.status.adapters import adapter_statuses
from tests.support.sim_adapters import SimAdapters
from tests.support.sim_pod import digest
from tests.support.slot_world import World


def source(content: str, *, base: str = "", pin: bool = False) -> SourceSpec:
    """What an object says about a content, which is one letter."""
    return SourceSpec(uri=uri(content), digest=digest(content) if pin else "", base_digest=base)


def uri(content: str) -> str:
    return f"file:///adapters/{content}"


class AdapterWorld(World):
    """Objects are known by name; the name that clients ask for is the same unless a test says otherwise."""

    def __init__(self, *, pods: int = 3, **options: Any) -> None:
        super().__init__(pods=pods, **options)
        self.contents = {uri(letter): digest(letter) for letter in "0123456789"}
        for pod in self.pods:
            pod.adapters = SimAdapters(pod_uid=pod.uid, contents=self.contents)
        self.writes = 0
        self.led_to: dict[str, frozenset[str]] = {}

    # Users

    def create(self, name: str, *sources: SourceSpec, pods: int | str = "All", alias: str = "", **spec: Any) -> None:
        wanted = LoRAAdapterSpec(
            adapter_name=alias or name,
            model_ref=ModelRef(name="slot"),
            sources=sources or (source("1"),),
            placement=Placement(pods=pods),
            **spec,
        )
        created = f"2026-01-01T00:00:{len(self.adapters):04d}Z"
        self.adapters = (*self.adapters, Adapter(name=name, uid=name, generation=1, created=created, spec=wanted))

    def change(self, name: str, **spec: Any) -> None:
        self._put(name, lambda a: replace(a, generation=a.generation + 1, spec=msgspec.structs.replace(a.spec, **spec)))

    def ask_again(self, name: str, value: str) -> None:
        self._put(name, lambda a: replace(a, requested_at=value))

    def remove(self, name: str) -> None:
        self.adapters = tuple(a for a in self.adapters if a.name != name)

    def _put(self, name: str, change: Any) -> None:
        self.adapters = tuple(change(a) if a.name == name else a for a in self.adapters)

    # The operator

    def run_pass(self) -> Action:
        action = super().run_pass()
        self._lead()
        for adapter, status in list(adapter_statuses(self.snapshot(), self.now)):
            if status != adapter.status:
                self.writes += 1
                self._put(adapter.name, lambda a, status=status: replace(a, status=status))
        return action

    def _lead(self) -> None:
        """Services lead where they should at once; who is led to is kept with each pass."""
        wishes = list(wanted_services(self.snapshot(), self.led_to)) if concerned(self.snapshot()) else []
        self.led_to = {w.adapter.uid: frozenset(e.uid for s in w.slices for e in s.endpoints) for w in wishes}
        self.memory.adapters.led({w.adapter.spec.adapter_name: w.left for w in wishes if w.adapter.spec}, self.now)

    def rest(self, seconds: float = 60) -> None:
        """Let passes and steps alternate for so long; for slots that go on trying."""
        ends = self.now + timedelta(seconds=seconds)
        while self.now < ends:
            action = self.run_pass()
            if not isinstance(action, Wait):
                continue
            if any(p.busy or p.loading or p.live is None for p in self.pods):
                self.tick()
            else:
                self.now = min(max(action.until or ends, self.now + timedelta(seconds=0.5)), ends)

    # What tests ask

    def status_of(self, name: str) -> LoRAAdapterStatus:
        return next(a.status for a in self.adapters if a.name == name)

    def says(self, name: str) -> dict[str, tuple[str, str]]:
        """Condition type → (status, reason)."""
        return {c.type: (c.status, c.reason) for c in self.status_of(name).conditions}

    def message(self, name: str) -> str:
        return next(c.message for c in self.status_of(name).conditions if c.type == "Ready")

    def loaded(self) -> list[dict[str, str]]:
        """Of each pod: name → content."""
        found = []
        for pod in self.pods:
            assert pod.adapters is not None
            found.append({name: s.uri.rpartition("/")[2] for name, s in sorted(pod.adapters.served.items())})
        return found

    def break_content(self, content: str, code: str = "InvalidCheckpoint", *, retryable: bool = False) -> None:
        assert self.contents is not None
        self.contents[uri(content)] = ErrorBody(code=code, message="tensor x is cut short", retryable=retryable)
