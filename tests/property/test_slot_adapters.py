"""Whatever users and fate do to the adapters of a slot, nothing that is wanted goes away, and all ends as wanted."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from modelswap_engine.protocol.adapters import OnIncompatible
from modelswap_operator.api.loraadapter import Placement, ServiceSpec
from modelswap_operator.api.modelversion import AdaptersSpec
from modelswap_operator.planning.actions import SendAdapters, StartSwaps, Wait, WriteAssignment
from modelswap_operator.planning.adapter_services import wanted_services
from modelswap_operator.planning.snapshot import Adapter
from modelswap_operator.status.adapters import adapter_statuses
from tests.support.adapter_world import AdapterWorld, source, uri
from tests.support.sim_pod import GOOD, digest
from tests.support.slot_fate import PICK, SlotFate

BASES = ["", *(release.digest for release in GOOD.values())]
CONTENTS = st.sampled_from("123")
SOURCES = st.dictionaries(st.sampled_from(BASES), st.tuples(CONTENTS, st.booleans()), min_size=1, max_size=3)
PLACES = st.sampled_from(["All", 1, 2])
NAMES = ["a", "b", "c"]


def sources_of(drawn: dict[str, tuple[str, bool]]) -> tuple[Any, ...]:
    return tuple(source(content, base=base, pin=pin) for base, (content, pin) in sorted(drawn.items()))


class AdapterRollouts(SlotFate):
    """Users edit both kinds, pods come, go and restart, the operator is killed; between all that it makes passes."""

    @initialize(pods=st.integers(1, 3), unload=st.booleans())
    def begin(self, pods: int, unload: bool) -> None:
        self.world = AdapterWorld(pods=pods)
        on = OnIncompatible.UNLOAD if unload else OnIncompatible.BLOCK
        self.world.edit(adapters=AdaptersSpec(on_incompatible=on))
        self.revision = 0

    # The operator

    @rule(times=st.sampled_from([1, 2, 4, 12]))
    def work(self, times: int) -> None:
        for _ in range(times):
            before = self._wanted()
            action = self.world.run_pass()
            if self.world.spec.suspend:
                assert not isinstance(action, WriteAssignment | SendAdapters | StartSwaps), "a suspended slot"
            if isinstance(action, Wait):
                self.world.tick()
            gone = before - self._wanted()
            assert not gone, f"{gone} went away although nobody took them away"

    def _wanted(self) -> set[tuple[str, str]]:
        """Pod and name of what is served, and wanted everywhere whatever the base is."""
        asked = {a.spec.adapter_name for a in self.world.adapters if a.spec is not None and self._free(a.spec)}
        return {
            (pod.uid, name) for pod in self.world.pods if pod.adapters for name in pod.adapters.served.keys() & asked
        }

    def _free(self, spec: Any) -> bool:
        return spec.placement.pods == "All" and any(not s.base_digest for s in spec.sources)

    # Users

    @rule(name=st.sampled_from(NAMES), alias=st.sampled_from(NAMES), drawn=SOURCES, pods=PLACES)
    def create(self, name: str, alias: str, drawn: dict[str, tuple[str, bool]], pods: int | str) -> None:
        if not any(a.name == name for a in self.world.adapters):
            service = ServiceSpec(port=80)
            self.world.create(name, *sources_of(drawn), pods=pods, alias=alias, service=service)

    @precondition(lambda self: self.world.adapters)
    @rule(pick=PICK, drawn=SOURCES, pods=PLACES, suspend=st.booleans())
    def change(self, pick: int, drawn: dict[str, tuple[str, bool]], pods: int | str, suspend: bool) -> None:
        name = self.world.adapters[pick % len(self.world.adapters)].name
        self.world.change(name, sources=sources_of(drawn), placement=Placement(pods=pods), suspend=suspend)

    @precondition(lambda self: self.world.adapters)
    @rule(pick=PICK)
    def remove(self, pick: int) -> None:
        self.world.remove(self.world.adapters[pick % len(self.world.adapters)].name)

    @precondition(lambda self: self.world.adapters)
    @rule(pick=PICK, passes=st.integers(0, 3))
    def make_again(self, pick: int, passes: int) -> None:
        adapter = self.world.adapters[pick % len(self.world.adapters)]
        spec = adapter.spec
        assert spec is not None
        self.world.remove(adapter.name)
        for _ in range(passes):
            self.world.run_pass()
        again = {"pods": spec.placement.pods, "alias": spec.adapter_name, "service": spec.service}
        self.world.create(adapter.name, *spec.sources, **again)  # type: ignore[arg-type]

    @rule(version=st.sampled_from(sorted(GOOD)))
    def bump(self, version: str) -> None:
        self.world.bump(version)

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK, name=st.sampled_from(NAMES))
    def overrule(self, pick: int, name: str) -> None:
        pod = self._pod(pick)
        if pod.adapters is not None and name in pod.adapters.served and self.world.contents[uri("3")] == digest("3"):
            pod.adapters.overrule(name, uri("3"))

    # Fate

    @rule(content=CONTENTS, retryable=st.booleans())
    def break_source(self, content: str, retryable: bool) -> None:
        self.world.break_content(content, retryable=retryable)

    @rule(content=CONTENTS)
    def mend_source(self, content: str) -> None:
        self.world.contents[uri(content)] = digest(content)

    @precondition(lambda self: len(self.world.pods) < 4)
    @rule()
    def new_pod(self) -> None:
        stable = self.world.assignment.stable if self.world.assignment else None
        self.world.add_pod(None if stable else GOOD["1.0"])

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK, back=st.integers(0, 3))
    def mounted_file_arrives(self, pick: int, back: int) -> None:
        written = self.world.actions(WriteAssignment)
        adapters = self._pod(pick).adapters
        if adapters is not None and len(written) > back:
            adapters.follow(written[-1 - back].assignment)

    # What always holds

    @invariant()
    def what_counts_or_is_led_to_cannot_be_taken_away_by_what_was_decided(self) -> None:
        snapshot = self.world.snapshot()
        for adapter, status in adapter_statuses(snapshot, self.world.now):
            for row in status.pods:
                assert row.state != "Loaded" or self._stays(row.uid, adapter, row.digest)
        for wanted in wanted_services(snapshot, {}):
            for uid in {one.uid for part in wanted.slices for one in part.endpoints}:
                assert self._stays(uid, wanted.adapter)

    def _stays(self, uid: str, adapter: Adapter, digest: str = "") -> bool:
        """Say whether a pod serves a name whichever assignment it comes to follow of those that it may still see."""
        pod = next(pod for pod in self.world.pods if pod.uid == uid)
        assert pod.adapters is not None
        assert pod.live is not None
        assert adapter.spec is not None
        written = [action.assignment for action in self.world.actions(WriteAssignment)]
        coming = [(w.epoch, w.adapters_revision) for w in written]
        found = [w.adapters for w, order in zip(written, coming, strict=True) if order > pod.adapters.order]
        for adapters in [pod.adapters.items, *found]:
            item = next((item for item in adapters if item.name == adapter.spec.adapter_name), None)
            source = item.source_for(pod.live.digest) if item is not None and item.meant_for(uid) else None
            if source is None or (digest and source.digest != digest):
                return False
        return True

    @invariant()
    def the_assignment_is_pinned_and_its_count_only_rises(self) -> None:
        current = self.world.assignment
        if current is None:
            return
        assert current.adapters_revision >= self.revision
        self.revision = current.adapters_revision
        names = [item.name for item in current.adapters]
        assert len(names) == len(set(names))
        assert all(found.digest for item in current.adapters for found in item.sources)

    @invariant()
    def loaded_means_that_the_pod_said_so_under_its_boot_id(self) -> None:
        for adapter in self.world.adapters:
            for row in adapter.status.pods:
                assert row.state != "Loaded" or (row.digest and row.boot_id)

    def teardown(self) -> None:
        """Fate relents: pods serve what is wanted, no more and no less, and each object says how it stands."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for content in "123":
            world.contents[uri(content)] = digest(content)
        for pod in world.pods:
            pod.reachable = True
            pod.ready = pod.live is not None
        for adapter in world.adapters:
            world.change(adapter.name, suspend=False)
        world.edit(suspend=False, adapters=AdaptersSpec(on_incompatible=OnIncompatible.UNLOAD))
        world.settle(limit=3000)
        if not world.pods:
            world.add_pod(None if world.assignment is not None else GOOD["1.0"])
            world.settle(limit=3000)
        assert set(world.serving()) == {world.spec.version}
        served: dict[str, str] = {}
        left = set()  # what a name leads to stays where its object has nothing for this base
        for adapter in world.adapters:
            spec, ready = adapter.spec, world.says(adapter.name)["Ready"]
            assert spec is not None
            by_base = {found.base_digest: found for found in spec.sources}
            fits = by_base.get(GOOD[world.spec.version].digest) or by_base.get("")
            if spec.adapter_name in {*served, *left} or ready[1] == "NameTaken":
                assert ready == ("False", "NameTaken")
            elif fits is None:
                assert ready == ("False", "NoSourceForBase")
                left.add(spec.adapter_name)
            else:
                short = spec.placement.pods not in ("All", *range(len(world.pods) + 1)) and world.pods
                assert ready == (("Unknown", "Progressing") if short else ("True", "Succeeded"))
                served[spec.adapter_name] = fits.uri.rpartition("/")[2]
        for names in world.loaded():
            assert {name: content for name, content in names.items() if name not in left}.items() <= served.items()
        writes = (world.writes, world.status_writes)
        world.run_pass()
        world.run_pass()
        assert (world.writes, world.status_writes) == writes, "a settled slot is written again"


TestAdapterRollouts = AdapterRollouts.TestCase
TestAdapterRollouts.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
