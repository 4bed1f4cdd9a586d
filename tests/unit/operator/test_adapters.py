"""LoRAAdapters of a slot: what is assigned, what pods are told, what objects say, by the real planner and status."""

from datetime import timedelta

import msgspec
import pytest

from modelswap_engine.protocol.adapters import OnIncompatible
from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.policy import Verification
from modelswap_operator.api.loraadapter import Placement, SourceSpec
from modelswap_operator.api.modelversion import AdaptersSpec, CredentialsRef, VerificationSpec
from modelswap_operator.planning.actions import AskAdapters, AskPlans, SendAdapters, StartSwaps, WriteAssignment
from modelswap_operator.planning.adapter_steps import LATE_AT_ONCE
from modelswap_operator.status.adapters import adapter_statuses
from tests.support.adapter_world import AdapterWorld, source, uri
from tests.support.sim_pod import CATALOG, digest

READY = {"Ready": ("True", "Succeeded")}
V10, V11 = CATALOG["1.0"].digest, CATALOG["1.1"].digest


def world(**options: object) -> AdapterWorld:
    made = AdapterWorld(**options)  # type: ignore[arg-type]
    made.settle()
    return made


def adapter_writes(made: AdapterWorld) -> list[WriteAssignment]:
    return [w for w in made.actions(WriteAssignment) if w.why.startswith("adapters")]


def test_an_adapter_is_looked_up_once_pinned_and_loaded_by_all_pods() -> None:
    made = world()
    made.create("a")
    made.settle()
    assert made.loaded() == [{"a": "1"}] * 3
    assert (made.says("a"), made.message("a")) == (READY, "3/3 pods serve it")
    status = made.status_of("a")
    assert (status.loaded_pods, status.wanted_pods, status.observed_generation) == (3, 3, 1)
    assert status.target is not None
    assert (status.target.uri, status.target.digest) == (uri("1"), digest("1"))
    assert {(p.state, p.digest, p.boot_id) for p in status.pods} == {("Loaded", digest("1"), "boot-0")}
    assert made.assignment is not None
    assert made.assignment.adapters[0].sources[0].digest == digest("1")
    assert (len(made.actions(AskAdapters)), len(adapter_writes(made))) == (1, 1)


def test_a_settled_slot_is_neither_written_nor_told_again() -> None:
    made = world()
    made.create("a")
    made.settle()
    before = (made.writes, made.status_writes, len(made.log))
    made.settle()
    assert (made.writes, made.status_writes) == before[:2]
    assert not [a for a in made.log[before[2] :] if isinstance(a, WriteAssignment | SendAdapters | AskAdapters)]


def test_a_pin_needs_no_looking_up_and_other_content_is_refused_by_each_pod() -> None:
    made = world()
    made.create("good", source("1", pin=True))
    made.settle()
    assert (made.says("good"), made.actions(AskAdapters)) == (READY, [])
    assert made.contents is not None
    made.contents[uri("2")] = digest("9")
    made.change("good", sources=(source("2", pin=True),))
    made.settle()
    assert made.loaded() == [{"good": "1"}] * 3
    assert made.says("good") == {"Ready": ("False", "DigestMismatch"), "Stalled": ("True", "DigestMismatch")}
    assert "0/3 pods serve it; pod pod-1: DigestMismatch" in made.message("good")


def test_a_change_of_adapters_is_no_revision_of_the_version() -> None:
    made = world()
    made.bump("1.1")
    made.settle()
    assert made.assignment is not None
    revision, swaps = made.assignment.revision, len(made.actions(StartSwaps))
    for content in "123":
        made.create(f"a{content}", source(content))
        made.settle()
    assert (made.assignment.revision, made.assignment.adapters_revision) == (revision, 3)
    assert (len(made.actions(StartSwaps)), made.condition("Ready")) == (swaps, ("True", "Succeeded"))


def test_content_that_cannot_be_looked_up_reaches_no_pod_and_the_old_one_stays() -> None:
    made = world()
    made.create("a")
    made.settle()
    made.break_content("2")
    made.change("a", sources=(source("2"),))
    made.rest()
    assert made.loaded() == [{"a": "1"}] * 3
    assert made.says("a") == {"Ready": ("False", "InvalidCheckpoint"), "Stalled": ("True", "InvalidCheckpoint")}
    assert made.status_of("a").observed_generation == 2
    made.change("a", sources=(source("3"),))
    made.settle()
    assert (made.loaded(), made.says("a")) == ([{"a": "3"}] * 3, READY)


def test_one_base_s_bad_content_keeps_no_other_base_s_from_changing() -> None:
    made = world()
    made.create("a", source("1", base=V10), source("2", base=V11))
    made.settle()
    made.break_content("3")
    made.change("a", sources=(source("3", base=V10), source("4", base=V11)))
    made.rest()
    assert made.assignment is not None
    assert [found.uri for found in made.assignment.adapters[0].sources] == [uri("1"), uri("4")]
    assert (made.loaded(), made.says("a")["Stalled"]) == ([{"a": "1"}] * 3, ("True", "InvalidCheckpoint"))


def test_a_source_that_cannot_be_read_now_is_tried_again() -> None:
    made = world()
    made.break_content("1", "SourceUnreadable", retryable=True)
    made.create("a")
    for _ in range(5):
        made.run_pass()
    assert made.says("a") == {
        "Ready": ("False", "SourceUnreadable"),
        "Reconciling": ("True", "ProgressingWithRetry"),
    }
    assert made.contents is not None
    made.contents[uri("1")] = digest("1")
    made.settle()
    assert made.says("a") == READY


def test_somebody_who_asks_has_every_try_made_now_and_once() -> None:
    made = world()
    made.break_content("1")
    made.create("a")
    made.create("b", source("2"))
    made.rest(600)
    looked_up = len(made.actions(AskAdapters))
    assert made.contents is not None
    made.contents[uri("1")] = digest("1")
    made.run_pass()
    assert len(made.actions(AskAdapters)) == looked_up, "what is refused is looked at rarely"
    made.ask_again("a", "now")
    made.settle()
    assert (made.loaded(), made.says("a")) == ([{"a": "1", "b": "2"}] * 3, READY)
    assert [made.status_of(name).last_handled_request_at for name in "ab"] == ["now", ""]
    assert made.assignment is not None
    assert [item.requested_at for item in made.assignment.adapters] == ["now", ""], "pods that wait are told as well"
    writes, told = made.writes, len(adapter_writes(made))
    made.ask_again("a", "")  # whoever owns the object has put it in order
    made.settle()
    assert (made.writes, len(adapter_writes(made))) == (writes, told)
    assert made.status_of("a").last_handled_request_at == "now"


def test_sources_that_hang_hold_up_nothing_that_does_not() -> None:
    made = world()
    slow = [f"s3://slow/{number}" for number in range(20)]
    made.hanging = set(slow)
    for number, place in enumerate(slow):
        made.create(f"slow-{number}", SourceSpec(uri=place))
    made.create("a")
    made.rest()
    assert (made.loaded(), made.says("a")) == ([{"a": "1"}] * 3, READY)
    pending = [result for result in made.memory.view().resolved.values() if result.pending]
    assert len(pending) == LATE_AT_ONCE, "each by itself, a few at a time"
    assert made.contents is not None
    made.contents["s3://slow/new"] = digest("1")
    made.create("new", SourceSpec(uri="s3://slow/new"))
    made.rest()
    assert made.says("new") == READY
    asked = len(made.actions(AskAdapters))
    made.pods = [pod for pod in made.pods if pod.name != pending[0].pod]
    made.rest()
    assert len(made.actions(AskAdapters)) > asked, "a pod that is gone will not answer"


def test_a_pod_that_is_lost_while_it_looks_a_source_up_is_not_waited_for() -> None:
    made = world()
    made.hanging = {"s3://slow/one"}
    made.create("slow", SourceSpec(uri="s3://slow/one"))
    made.rest()
    (pending,) = (result for result in made.memory.view().resolved.values() if result.pending)
    for pod in made.pods:
        pod.reachable = pod.name != pending.pod
    for _ in range(10):
        made.run_pass()
        made.tick()
    assert [order.pod.name for asked in made.actions(AskAdapters) for order in asked.orders] == ["pod-1", "pod-2"]


def test_what_was_looked_up_stays_whatever_becomes_of_the_source() -> None:
    made = world()
    made.create("a")
    made.settle()
    assert made.contents is not None
    made.contents[uri("1")] = digest("9")
    made.kill_operator()
    made.settle()
    assert made.assignment is not None
    assert made.assignment.adapters[0].sources[0].digest == digest("1")


def test_a_removed_adapter_is_taken_from_the_assignment_and_from_the_pods() -> None:
    made = world()
    made.create("a")
    made.create("b", source("2"), drain_timeout_seconds=5)
    made.settle()
    made.remove("a")
    made.settle()
    assert made.loaded() == [{"b": "2"}] * 3
    assert made.assignment is not None
    assert [(i.name, i.drain_timeout_seconds) for i in made.assignment.adapters] == [("b", 5)]


def test_the_older_of_two_objects_has_the_name_and_the_other_takes_it_over_when_it_goes() -> None:
    made = world()
    made.create("first", alias="support")
    made.create("second", source("2"), alias="support")
    made.settle()
    assert (made.loaded(), made.says("first")) == ([{"support": "1"}] * 3, READY)
    assert made.says("second") == {"Ready": ("False", "NameTaken"), "Stalled": ("True", "NameTaken")}
    assert "support is taken by LoRAAdapter first" in made.message("second")
    made.remove("first")
    made.settle()
    assert (made.loaded(), made.says("second")) == ([{"support": "2"}] * 3, READY)


def test_the_name_of_the_base_is_taken() -> None:
    made = world()
    made.create("a", alias="m")
    made.settle()
    assert made.says("a")["Stalled"] == ("True", "NameTaken")
    assert "ModelVersion slot" in made.message("a")
    assert made.loaded() == [{}] * 3


def test_a_number_of_pods_is_kept_while_pods_come_and_go() -> None:
    made = world(pods=4)
    made.create("a", pods=2)
    made.create("b", source("2"), pods=2)
    made.settle()
    where = [sorted(pod) for pod in made.loaded()]
    assert sorted(map(tuple, where)) == [("a",), ("a",), ("b",), ("b",)]  # spread, not heaped
    made.add_pod()
    made.settle()
    assert [sorted(pod) for pod in made.loaded()] == [*where, []]
    gone = next(p for p in made.pods if p.adapters is not None and "a" in p.adapters.served)
    made.pods.remove(gone)
    made.settle()
    assert sum("a" in pod for pod in made.loaded()) == 2
    kept = [p for p in made.pods if p.adapters is not None and "b" in p.adapters.served]
    assert [p.name for p in kept] == [f"pod-{n + 1}" for n, names in enumerate(where) if names == ["b"]]
    assert (made.says("a"), made.status_of("a").wanted_pods) == (READY, 2)


def test_more_pods_than_there_are_is_all_of_them_and_not_ready_before_they_are_there() -> None:
    made = world(pods=2)
    made.create("a", pods=3)
    made.settle()
    assert made.loaded() == [{"a": "1"}] * 2
    assert made.says("a") == {"Ready": ("Unknown", "Progressing"), "Reconciling": ("True", "WaitingForPods")}
    assert made.message("a") == "2/3 pods serve it: placement.pods asks for 3, and the slot has 2 that were ever ready"
    assert (made.status_of("a").loaded_pods, made.status_of("a").wanted_pods) == (2, 3)
    made.edit(suspend=True)
    made.settle()
    assert made.says("a")["Ready"] == ("Unknown", "Suspended")
    made.edit(suspend=False)
    made.add_pod()
    made.settle()
    assert (made.loaded(), made.says("a"), made.message("a")) == ([{"a": "1"}] * 3, READY, "3/3 pods serve it")
    made.pods.clear()
    made.settle()
    assert made.says("a") == {"Ready": ("True", "ScaledToZero")}


def test_a_new_pod_finds_its_adapters_in_the_assignment_before_anybody_tells_it() -> None:
    made = world()
    made.create("a")
    made.settle()
    pod = made.add_pod()
    assert pod.adapters is not None
    assert (set(pod.adapters.served), pod.adapters.calls) == ({"a"}, 0)
    made.settle()
    assert (made.message("a"), pod.adapters.calls) == ("4/4 pods serve it", 0)


def test_a_restarted_pod_counts_again_only_once_it_says_so_under_its_new_boot_id() -> None:
    made = world()
    made.create("a")
    made.settle()
    made.pods[0].restart()
    made.run_pass()
    assert made.says("a")["Ready"][0] == "Unknown"
    assert made.status_of("a").loaded_pods == 2
    made.settle()
    assert (made.says("a"), {p.boot_id for p in made.status_of("a").pods}) == (READY, {"boot-0", "boot-1"})


def test_old_content_and_an_unproved_base_do_not_count_as_loaded() -> None:
    made = world()
    made.create("a")
    made.settle()
    made.change("a", sources=(source("2"),))
    for _ in range(4):  # looked up, assigned, told; no pod has had the time to load it
        made.run_pass()
    assert (made.status_of("a").loaded_pods, made.says("a")["Reconciling"]) == (0, ("True", "LoadingAdapter"))
    made.settle()
    unproved = msgspec.structs.replace(made.pods[0].state(), ranks=[])
    made.pods[0].state = lambda: unproved  # type: ignore[method-assign]
    made.run_pass()
    assert (made.status_of("a").loaded_pods, made.says("a")["Ready"][0]) == (2, "Unknown")


def test_an_engine_without_adapters_is_named() -> None:
    made = world()
    assert made.pods[1].adapters is not None
    made.pods[1].adapters.room = None
    made.create("a")
    made.settle()
    assert made.says("a")["Stalled"] == ("True", "AdaptersUnsupported")
    assert "2/3 pods serve it; pod pod-2: the engine was started without slots" in made.message("a")


def test_a_pod_without_room_says_so_and_keeps_what_it_has() -> None:
    made = world()
    assert made.pods[0].adapters is not None
    made.pods[0].adapters.room = 1
    made.create("a")
    made.settle()
    made.create("b", source("2"))
    made.settle()
    assert made.loaded() == [{"a": "1"}, {"a": "1", "b": "2"}, {"a": "1", "b": "2"}]
    assert (made.says("a"), made.says("b")["Stalled"]) == (READY, ("True", "AdapterLimit"))
    assert "2/3 pods serve it; pod pod-1: AdapterLimit: the engine can hold 1; unload one" in made.message("b")
    made.remove("a")
    made.settle()
    assert (made.loaded(), made.says("b")) == ([{"b": "2"}] * 3, READY)


def test_a_suspended_adapter_stays_as_it_is_everywhere() -> None:
    made = world()
    made.create("a")
    made.settle()
    made.change("a", sources=(source("2"),), suspend=True)
    made.settle()
    assert made.loaded() == [{"a": "1"}] * 3
    assert made.says("a") == {"Ready": ("Unknown", "Suspended"), "Suspended": ("True", "Suspended")}
    made.change("a", suspend=False)
    made.settle()
    assert (made.loaded(), made.says("a")) == ([{"a": "2"}] * 3, READY)


def test_a_suspended_slot_moves_no_adapters() -> None:
    made = world()
    made.edit(suspend=True)
    made.create("a")
    made.settle()
    assert made.loaded() == [{}] * 3
    assert (made.says("a")["Ready"], "ModelVersion slot is suspended" in made.message("a")) == (
        ("Unknown", "Suspended"),
        True,
    )
    made.edit(suspend=False)
    made.settle()
    assert made.says("a") == READY


def test_without_its_slot_an_adapter_waits_and_says_for_what() -> None:
    made = AdapterWorld()
    made.deleted = True
    made.create("a")
    made.run_pass()
    assert made.says("a") == {"Ready": ("False", "SlotNotFound"), "Reconciling": ("True", "SlotNotFound")}
    made.deleted = False
    made.settle()
    assert made.says("a") == READY


def test_pods_of_a_deleted_slot_keep_their_adapters() -> None:
    made = world()
    made.create("a")
    made.settle()
    made.deleted = True
    made.settle()
    assert made.loaded() == [{"a": "1"}] * 3
    assert made.says("a")["Ready"] == ("False", "SlotNotFound")
    assert made.assignment is not None
    assert (made.assignment.released, len(made.assignment.adapters)) == (True, 1)


def test_an_object_that_is_made_anew_has_its_adapters_under_a_higher_count() -> None:
    made = world()
    made.create("a")
    made.settle()
    made.deleted = True
    made.settle()
    made.deleted, made.uid = False, "owner-2"
    made.settle()
    assert made.assignment is not None
    assert (made.assignment.owner_uid, made.assignment.adapters_revision) == ("owner-2", 2)
    assert (made.loaded(), made.says("a")) == ([{"a": "1"}] * 3, READY)


def test_scaled_to_zero_is_ready_and_pods_that_were_never_ready_are_waited_for() -> None:
    made = world()
    made.create("a")
    made.settle()
    made.pods.clear()
    made.settle()
    assert made.says("a") == {"Ready": ("True", "ScaledToZero")}
    fresh = AdapterWorld(pods=0)
    fresh.create("a")
    fresh.settle()
    assert fresh.says("a")["Reconciling"] == ("True", "WaitingForPods")


def test_a_pod_that_cannot_be_told_is_tried_again_and_holds_up_no_version() -> None:
    made = world()
    assert made.pods[0].adapters is not None
    made.pods[0].adapters.owner_uid = "somebody"
    made.create("a")
    made.bump("1.1")
    made.rest()
    assert made.serving() == ["1.1"] * 3
    assert made.says("a")["Reconciling"] == ("True", "ProgressingWithRetry")
    assert "pod pod-1: ForeignOwner" in made.message("a")
    made.pods[0].adapters.owner_uid = ""
    made.now += timedelta(minutes=5)
    made.settle()
    assert made.says("a") == READY


def test_what_a_person_did_is_told_and_overruled() -> None:
    made = world()
    made.create("a")
    made.settle()
    adapters = made.pods[1].adapters
    assert adapters is not None
    adapters.overrule("a", uri("5"))
    assert [pod["a"] for pod in made.loaded()] == ["1", "5", "1"]
    made.settle()
    assert (made.loaded(), made.says("a")) == ([{"a": "1"}] * 3, READY)
    assert made.assignment is not None
    assert made.assignment.adapters_revision == 3


def test_so_is_what_a_person_did_about_a_name_that_could_not_be_loaded() -> None:
    made = world()
    adapters = made.pods[1].adapters
    assert adapters is not None
    adapters.room = 0
    made.create("a")
    made.settle()
    adapters.overrule("a", uri("5"))
    adapters.room = 256
    made.settle()
    assert (made.loaded(), made.says("a")) == ([{"a": "1"}] * 3, READY)


def test_more_than_an_assignment_holds_is_said_of_the_youngest() -> None:
    made = world(pods=1)
    for number in range(257):
        made.create(f"a{number:03d}", source("1", pin=True))
    made.settle(limit=2000)
    assert made.says("a255") == READY
    assert made.says("a256")["Stalled"] == ("True", "TooManyAdapters")
    assert len(made.loaded()[0]) == 256


# Together with the base


def test_the_source_for_the_new_base_comes_with_it() -> None:
    made = world()
    made.create("a", source("1", base=V10), source("2", base=V11))
    made.settle()
    assert made.loaded() == [{"a": "1"}] * 3
    made.bump("1.1")
    made.settle()
    assert (made.serving(), made.loaded(), made.says("a")) == (["1.1"] * 3, [{"a": "2"}] * 3, READY)
    assert {o.request.adapters.on_incompatible for a in made.actions(StartSwaps) for o in a.orders} == {
        OnIncompatible.BLOCK
    }


def test_pods_that_are_taken_over_are_never_stalled_for_an_adapter_of_another_base() -> None:
    made = AdapterWorld(pinned=True)  # they serve what the object says, and nobody has taken them over
    made.create("a", source("1", base=V11, pin=True))
    for _ in range(25):
        made.run_pass()
        made.tick()
        assert made.condition("Stalled") is None
    assert made.condition("Ready") == ("True", "Succeeded")


def test_an_adapter_without_a_source_for_the_new_base_blocks_it_until_it_has_one() -> None:
    made = world()
    made.create("a", source("1", base=V10))
    made.settle()
    made.bump("1.1")
    made.settle()
    assert (made.serving(), made.actions(StartSwaps)) == (["1.0"] * 3, [])
    assert (made.condition("Stalled"), made.says("a")) == (("True", "BlockedByAdapter"), READY)
    assert made.status.failures == ()
    made.change("a", sources=(source("1", base=V10), source("2", base=V11)))
    made.settle()
    assert (made.serving(), made.loaded(), made.condition("Ready")) == (
        ["1.1"] * 3,
        [{"a": "2"}] * 3,
        ("True", "Succeeded"),
    )


def test_both_in_one_commit_of_git_with_the_old_base_gone_from_the_adapter() -> None:
    made = world()
    made.create("a", source("1", base=V10))
    made.settle()
    made.bump("1.1")
    made.change("a", sources=(source("2", base=V11),))
    for _ in range(200):
        made.run_pass()
        if not all(pod.get("a") for pod in made.loaded()):
            pytest.fail(f"an adapter went away in between: {made.loaded()}")
        made.tick()
    assert (made.serving(), made.loaded(), made.says("a")) == (["1.1"] * 3, [{"a": "2"}] * 3, READY)


def test_what_an_adapter_is_to_blame_for_is_no_failure_of_the_version() -> None:
    made = world()
    blamed = ErrorBody(code="InvalidCheckpoint", message="adapter a is cut short", details={"adapter": "a"})
    made.not_now = blamed
    made.bump("1.1")
    made.settle()
    assert (made.serving(), made.status.failures) == (["1.1"] * 3, ())
    made.not_now = ErrorBody(code="InvalidCheckpoint", message="a shard is cut short")
    made.bump("1.2")
    made.settle()
    assert (made.serving(), len(made.status.failures)) == (["1.1"] * 3, 1)


def test_the_plan_says_which_adapters_change_with_the_base() -> None:
    made = world()
    made.plan_lines = ("a: file:///adapters/2", "b: unloaded, it is bound to another base")
    made.bump("1.1", suspend=True, adapters=AdaptersSpec(on_incompatible=OnIncompatible.UNLOAD))
    made.settle()
    assert [plan.adapters for plan in made.status.plan] == [made.plan_lines]
    asked = [o.request.adapters.on_incompatible for a in made.actions(AskPlans) for o in a.orders]
    assert asked[-1] is OnIncompatible.UNLOAD


def test_unload_lets_the_version_through() -> None:
    made = world()
    made.create("a", source("1", base=V10))
    made.settle()
    made.bump("1.1", adapters=AdaptersSpec(on_incompatible=OnIncompatible.UNLOAD))
    made.settle()
    assert made.serving() == ["1.1"] * 3
    assert made.says("a")["Stalled"] == ("True", "NoSourceForBase")
    assert {o.request.adapters.on_incompatible for a in made.actions(StartSwaps) for o in a.orders} == {
        OnIncompatible.UNLOAD
    }


def test_on_the_way_back_no_adapter_stands_in_the_way() -> None:
    made = world()
    made.create("a", source("1"))
    made.pods[1].refuses.add("1.1")
    made.bump("1.1")
    made.settle()
    assert made.serving() == ["1.0"] * 3
    back = [o for a in made.actions(StartSwaps) for o in a.orders if o.request.target.digest == V10]
    assert back
    assert {o.request.adapters.on_incompatible for o in back} == {OnIncompatible.UNLOAD}


def test_two_hundred_adapters_on_three_pods() -> None:
    made = world()
    for number in range(200):
        made.create(f"a{number:03d}", source(str(number % 10)))
    made.settle(limit=4000)
    assert [len(pod) for pod in made.loaded()] == [200] * 3
    assert {made.says(a.name) == READY for a in made.adapters} == {True}
    assert len(made.actions(SendAdapters)) <= 20
    assert len(made.actions(AskAdapters)) == 13  # sixteen at a time


def test_credentials_and_the_slot_s_policy_go_with_an_adapter_to_who_looks_it_up_and_who_loads_it() -> None:
    made = world(protocol=3)
    made.edit(verification=VerificationSpec(required=True, keys=("release.pub",)))
    named = msgspec.structs.replace(source("1"), credentials_ref=CredentialsRef(name="adapters"))
    made.create("a", named)
    made.settle()
    wire = Verification(required=True, keys=("release.pub",))
    asked = made.actions(AskAdapters)[0].orders[0].request.sources[0]
    assert (asked.uri, asked.credentials, asked.verification) == (uri("1"), "adapters", wire)
    assert made.assignment is not None
    loaded = made.assignment.adapters[0].source_for(V10)
    assert loaded is not None
    assert (loaded.credentials, loaded.verification) == ("adapters", wire)


def test_what_was_refused_is_looked_up_again_with_other_credentials_and_under_another_policy() -> None:
    made = world(protocol=3)
    made.edit(verification=VerificationSpec(required=True))
    made.break_content("1", "SignatureMissing")
    made.create("a")
    made.rest()
    assert made.says("a") == {"Ready": ("False", "SignatureMissing"), "Stalled": ("True", "SignatureMissing")}
    assert made.contents is not None
    made.contents[uri("1")] = digest("1")
    asked = len(made.actions(AskAdapters))
    made.run_pass()
    assert len(made.actions(AskAdapters)) == asked, "it waits for its next try"
    made.edit(verification=VerificationSpec())
    made.settle()
    assert (len(made.actions(AskAdapters)), made.says("a")) == (asked + 1, READY)
    made.break_content("2", "CredentialsNotMounted")
    made.change("a", sources=(source("2"),))
    made.rest()
    assert made.says("a")["Stalled"] == ("True", "CredentialsNotMounted")
    made.contents[uri("2")] = digest("2")
    named = msgspec.structs.replace(source("2"), credentials_ref=CredentialsRef(name="adapters"))
    made.change("a", sources=(named,))
    made.settle()
    assert (made.loaded(), made.says("a")) == ([{"a": "2"}] * 3, READY)


def test_a_pod_that_is_too_old_to_verify_an_adapter_is_not_assigned_it_until_it_is_upgraded() -> None:
    made = world(protocol=3)
    made.pods[0].protocol = 2
    made.edit(verification=VerificationSpec(required=True))
    made.create("a", source("1", pin=True))
    made.create("b", source("2"))
    made.create("c", source("3"), pods=3)
    made.rest(10)
    assert made.loaded() == [{}, *[{"a": "1", "b": "2", "c": "3"}] * 2]
    assert {order.pod.name for action in made.actions(AskAdapters) for order in action.orders} == {"pod-2"}
    for name in "abc":
        assert made.says(name)["Stalled"] == ("True", "EngineProtocolUnsupported")
        assert "2/3 pods serve it; pod pod-1: the sidecar of pod pod-1 is too old" in made.message(name)
        assert "upgrade the engine image" in made.message(name)
    made.pods[0].protocol = 3
    made.rest(10)
    assert made.loaded() == [{"a": "1", "b": "2", "c": "3"}] * 3
    assert made.says("a") == READY


def test_where_no_pod_can_verify_nothing_is_looked_up() -> None:
    made = world(protocol=2)
    made.edit(verification=VerificationSpec(required=True))
    made.create("a")
    made.rest(10)
    assert (made.actions(AskAdapters), made.loaded()) == ([], [{}] * 3)
    assert made.says("a")["Stalled"] == ("True", "EngineProtocolUnsupported")
    assert "pod-1" in made.message("a")


def test_what_an_old_pod_serves_stays_and_another_content_waits_for_its_upgrade() -> None:
    made = world(protocol=3)
    made.pods[0].protocol = 2
    made.create("a")
    made.settle()
    made.edit(verification=VerificationSpec(required=True))
    made.change("a", sources=(source("2", pin=True),))
    made.rest(10)
    assert made.loaded() == [{"a": "1"}] * 3
    assert made.says("a")["Stalled"] == ("True", "EngineProtocolUnsupported")
    assert "pod pod-1 is too old to verify" in made.message("a")
    made.pods[0].protocol = 3
    made.rest(10)
    assert (made.loaded(), made.says("a")) == ([{"a": "2"}] * 3, READY)


def made_again(made: AdapterWorld, *, told: bool) -> None:
    """Delete the object and make it anew, while pods still serve what the first one had them load."""
    made.remove("a")
    made.run_pass()
    if told:
        made.run_pass()
    assert made.assignment is not None
    assert (made.assignment.adapters, made.loaded()) == ([], [{"a": "1"}] * 3)
    made.create("a", source("1", pin=True))


def loaded_rows(made: AdapterWorld) -> list[str]:
    ((_, status),) = adapter_statuses(made.snapshot(), made.now)
    return [row.name for row in status.pods if row.state == "Loaded"]


@pytest.mark.parametrize("told", [True, False])
def test_what_pods_serve_of_an_adapter_that_was_deleted_is_not_yet_the_new_one(told: bool) -> None:
    made = world()
    made.create("a", source("1", pin=True))
    made.settle()
    made_again(made, told=told)
    assert loaded_rows(made) == [], "it is about to go"
    made.settle()
    assert (made.says("a"), made.loaded()) == (READY, [{"a": "1"}] * 3)


def test_a_pod_counts_once_it_cannot_read_the_decision_between_two_adapters_of_a_name() -> None:
    made = world()
    made.create("a", source("1", pin=True))
    made.settle()
    made_again(made, told=False)
    between = made.assignment
    assert between is not None
    made.run_pass()
    assert made.assignment is not None
    assert [item.name for item in made.assignment.adapters] == ["a"]
    assert loaded_rows(made) == [], "their mounted files may say for a minute that it was deleted"
    late = made.pods[0].adapters
    assert late is not None
    late.follow(between)
    made.pods[0].tick()
    assert made.loaded() == [{}, {"a": "1"}, {"a": "1"}]
    made.settle()
    assert (made.says("a"), made.loaded()) == (READY, [{"a": "1"}] * 3)


def test_content_that_was_left_and_is_wanted_again_counts_once_pods_know_that() -> None:
    made = world()
    made.create("a", source("1", pin=True))
    made.settle()
    made.change("a", sources=(source("2", pin=True),))
    while not isinstance(made.run_pass(), SendAdapters):
        pass
    made.change("a", sources=(source("1", pin=True),))
    assert (made.loaded(), loaded_rows(made)) == ([{"a": "1"}] * 3, []), "they are loading the other one"
    made.run_pass()
    assert loaded_rows(made) == []
    made.settle()
    assert (made.says("a"), made.loaded()) == (READY, [{"a": "1"}] * 3)


def test_a_pod_that_had_lost_its_place_counts_once_it_knows_that_it_has_it_again() -> None:
    made = world(pods=2)
    made.create("a", source("1", pin=True), pods=2)
    made.settle()
    for number in (1, 2):
        made.change("a", placement=Placement(pods=number))
        made.run_pass()
    assert made.loaded() == [{"a": "1"}] * 2
    assert "pod-2" not in loaded_rows(made), "its mounted file may still say that it has lost it"
    made.settle()
    assert (made.says("a"), made.loaded()) == (READY, [{"a": "1"}] * 2)


def test_one_adapter_s_change_is_none_of_another_s() -> None:
    made = world()
    made.create("a", source("1", pin=True))
    made.settle()
    writes = made.writes
    made.create("b", source("2", pin=True))
    for _ in range(3):
        made.run_pass()
        assert made.says("a") == READY
    made.settle()
    assert made.says("b") == READY
    assert made.status_of("a").conditions[0].observed_generation == 1
    assert made.writes - writes < 6, "a's status was written for b's sake"
