"""Random lives of a pod's adapters: assignments, files that are late, people, sources and processes that fail.

The model is what is assigned. Whatever the order, the engine holds just what the registry says, no assigned name loses
what it serves but to its successor, and when fate relents the pod serves what is assigned, and what people loaded.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelswap_engine.protocol.adapters import AdapterState
from modelswap_engine.protocol.assignment import AssignedAdapter
from modelswap_engine.protocol.errors import InvalidCheckpoint, ModelswapError, SourceUnreadable, WorkerLost
from modelswap_engine.protocol.messages import VersionRef
from tests.support.following import OTHER_BASE, World

BASE = "sha256:" + "b" * 64
NAMES, CONTENTS = ["a", "b", "c"], ["one", "two"]
ITEMS = st.dictionaries(
    st.sampled_from(NAMES), st.tuples(st.sampled_from(CONTENTS), st.sampled_from(["", BASE, OTHER_BASE])), max_size=3
)


class FollowingMachine(RuleBasedStateMachine):
    """One pod."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.wanted: dict[str, tuple[str, str]] = {}
        self.revision = 0
        self.by_hand: set[str] = set()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        async def make() -> World:
            return World(slots=8)

        self.world = self.run(make())
        for name in NAMES:
            for content in CONTENTS:
                self.world.opener.put(f"file:///adapters/{name}/{content}", content)

    def items(self) -> list[AssignedAdapter]:
        return [self.world.item(n, content, base=base) for n, (content, base) in sorted(self.wanted.items())]

    # The operator

    @rule(wanted=ITEMS, told=st.booleans())
    def assign(self, wanted: dict[str, tuple[str, str]], told: bool) -> None:
        """Publish, and perhaps tell; else the file says it some time later."""
        self.wanted, self.revision = wanted, self.revision + 10
        self.world.write(*self.items(), revision=self.revision)
        if told:
            self.run(self.world.assign(*self.items(), revision=self.revision))
            self.by_hand -= set(wanted)

    @precondition(lambda self: self.revision)
    @rule()
    def a_late_file(self) -> None:
        """The kubelet shows an older file; it is followed by nobody who knows better."""
        assert self.world.base.file is not None
        current, told = self.world.base.file, self.world.desk.view().assigned
        self.world.write(revision=1)
        self.run(self.world.clock.advance(16))
        self.world.base.file = current
        assert told is None or self.world.told.revision >= told.revision

    # People and fate

    @rule(name=st.sampled_from(NAMES))
    def load_by_hand(self, name: str) -> None:
        told = self.world.desk.view().assigned
        try:
            self.run(self.world.by_hand(name, revision=(told.revision if told is not None else 0) + 1))
        except ModelswapError:
            return
        self.by_hand.add(name)

    @rule(name=st.sampled_from(NAMES), content=st.sampled_from(CONTENTS), how=st.sampled_from(["", "gone", "bad"]))
    def source(self, name: str, content: str, how: str) -> None:
        uri = f"file:///adapters/{name}/{content}"
        errors: dict[str, ModelswapError] = {"gone": SourceUnreadable("away"), "bad": InvalidCheckpoint("cut short")}
        self.world.opener.errors.pop(uri, None)
        if how:
            self.world.opener.errors[uri] = errors[how]

    @rule(seconds=st.sampled_from([1, 20, 400]))
    def wait(self, seconds: int) -> None:
        self.run(self.world.clock.advance(seconds))

    @rule(call=st.sampled_from(["load", "drop"]))
    def the_engine_fails_once(self, call: str) -> None:
        if call == "load":
            self.world.host.fail[call] = WorkerLost("not now")

    @rule()
    def restart(self) -> None:
        self.run(self.world.restart())

    @rule()
    def other_base(self) -> None:
        world = self.world
        assert world.base.live is not None
        digest = OTHER_BASE if world.base.live.digest == BASE else BASE
        world.base.live = VersionRef(version="x", digest=digest)
        self.run(world.restart())

    # What always holds

    @invariant()
    def the_engine_holds_just_what_the_registry_says(self) -> None:
        if not hasattr(self, "world"):
            return
        self.run(self.world.clock.settle())
        rows = self.world.desk.view().adapters
        present = {row.id for row in rows if row.state not in (AdapterState.FAILED, AdapterState.UNLOADED)}
        assert self.world.host.held == present

    @invariant()
    def revisions_only_rise(self) -> None:
        told = self.world.desk.view().assigned if hasattr(self, "world") else None
        assert told is None or told.revision <= self.revision

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.opener.errors.clear()
        world.host.fail.clear()
        self.revision += 10
        world.write(*self.items(), revision=self.revision)
        self.run(world.assign(*self.items(), revision=self.revision))
        self.run(world.clock.advance(1000))
        assert world.base.live is not None
        served = world.served()
        for name, (content, base) in self.wanted.items():
            if base in ("", world.base.live.digest):
                assert served.pop(name) == content
            else:
                served.pop(name, None)  # what it led to may stay, where it fits
        assert set(served) <= self.by_hand
        assert set(world.problems().values()) <= {"IncompatibleAdapter"}
        assert world.told.open == 0
        self.run(world.desk.stop())
        self.runner.close()


TestFollowing = FollowingMachine.TestCase
TestFollowing.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
