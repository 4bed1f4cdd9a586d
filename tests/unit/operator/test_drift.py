"""Pods that serve something else than was decided, by nobody's decision: noticed at the next look, put right, told."""

import pytest

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_operator.planning.actions import StartSwaps
from modelswap_operator.status.events import of_status
from tests.support import sim_pod
from tests.support.sim_pod import GOOD, Release
from tests.support.slot_steps import named_first, started
from tests.support.slot_world import World


def test_what_somebody_changed_by_hand_is_put_right_every_time() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.settle()
    for letter in ("e", "f", "e"):
        before = len(started(world))
        world.pods[0].train(letter)
        world.settle()
        assert world.serving() == ["1.1", "1.1"]
        assert started(world)[before:] == [("pod-1",)], "the name of the operation was one that the pod had ended"
    assert world.condition("Ready") == ("True", "Succeeded")


def told(world: World) -> list[tuple[str, str]]:
    """Make one pass, and return the Events that its change of status is worth."""
    before = world.status
    world.run_pass()
    return [(note.reason, note.text) for note in of_status(before, world.status)]


def test_a_pod_changed_by_hand_is_told_once_and_put_right() -> None:
    world = World(pods=2)
    world.settle()
    world.pods[1].train("e")
    text = "pod pod-2 serves 1.0+e instead of 1.0, by nobody's decision here: it is put right"
    assert told(world) == [("Drifted", text)]
    assert told(world) == []
    world.settle()
    assert world.serving() == ["1.0", "1.0"]


def test_a_drifted_pod_is_found_among_more_pods_than_status_lists() -> None:
    world = World(pods=60)
    world.settle()
    world.pods[-1].train("e")
    assert [reason for reason, _ in told(world)] == ["Drifted"]


def test_a_new_pod_that_serves_another_version_at_first_has_not_drifted() -> None:
    world = World(pods=2, version="1.1", serving="1.1")
    world.settle()
    world.add_pod(GOOD["1.0"])
    assert "Drifted" not in {reason for reason, _ in told(world)}
    world.settle()
    assert world.serving() == ["1.1"] * 3


def test_an_engine_that_was_started_again_is_told() -> None:
    world = World(pods=2)
    world.settle()
    pod = world.pods[0]
    pod.restart()
    pod.load(world.assignment)
    ((reason, text),) = told(world)
    assert (reason, text) == (
        "EngineRestarted", "pod pod-1: its engine was started again (boot id boot-1), and it serves 1.0"
    )  # fmt: skip
    assert world.condition("Ready") == ("True", "Succeeded")


def test_damaged_tensors_are_told_and_shown_until_they_are_repaired() -> None:
    world = World(pods=2)
    world.settle()
    world.pods[0].drifted = ["lm_head.weight"]
    notes = told(world)
    assert ("Drifted", "pod pod-1: 1 live tensors are damaged and loaded again (lm_head.weight)") in notes
    assert (world.status.pods[0].name, world.status.pods[0].state) == ("pod-1", "Drifted")
    assert [reason for reason, _ in told(world)] == []
    world.pods[0].drifted = []
    world.run_pass()
    assert {row.state for row in world.status.pods} == {"Serving"}


def test_a_rollout_is_no_drift() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    reasons = set()
    for _ in range(60):
        reasons |= {reason for reason, _ in told(world)}
        world.tick()
    assert world.serving() == ["1.1"] * 3
    assert reasons == {"Succeeded"}


def test_a_source_that_moved_under_its_name_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.settle()
    error = ErrorBody(code="DigestMismatch", message="file:///models/1.1 holds sha256:9")
    moved = Release("1.1", GOOD["1.1"].digest, refused_late=error)
    monkeypatch.setitem(sim_pod.CATALOG, "1.1", moved)
    world.add_pod(GOOD["1.0"])
    world.settle()
    assert world.condition("Stalled") == ("True", "SourceDrifted")
    assert "holds sha256:9; publish each version under a name of its own" in world.status.failures[0].message
    assert world.serving() == ["1.1", "1.1", "1.0"]


def test_a_group_is_refused_with_its_reason_and_nothing_is_touched() -> None:
    world = World(pods=2)
    world.settle()
    world.pods[1].group = "LeaderWorkerSet big"
    world.bump("1.1")
    world.settle()
    assert not world.actions(StartSwaps)
    assert world.condition("Stalled") == ("True", "GroupsUnsupported")
    assert world.condition("Serving") == ("True", "PodsServe")
    message = next(c.message for c in world.status.conditions if c.type == "Ready")
    assert "pod pod-2 is one of a group (LeaderWorkerSet big)" in message
    writes = world.status_writes
    world.run_pass()
    assert world.status_writes == writes
    world.pods.pop()
    world.settle()
    assert world.serving() == ["1.1"]


def test_a_pod_that_came_back_under_its_name_is_another_pod() -> None:
    """A StatefulSet's pod keeps its name and gets another UID."""
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    assert named_first(world) == ["uid-1"]
    world.pods.pop(0)
    again = world.add_pod(GOOD["1.0"])
    again.name = "pod-1"
    world.settle()
    assert world.serving() == ["1.1"] * 3
    targets = [(o.pod.uid, o.request.fence.pod_uid) for a in world.actions(StartSwaps) for o in a.orders]
    assert all(uid == fenced for uid, fenced in targets)
    assert again.uid in {uid for uid, _ in targets}


def test_pods_that_come_and_go_do_not_unset_ready() -> None:
    """An autoscaler at work: a new pod counts when it was Ready once, and then it serves what is assigned."""
    world = World(pods=2)
    world.settle()
    writes = []
    for turn in range(6):
        new = world.add_pod(ready=False)
        new.live, new.ever_ready = None, False
        world.run_pass()
        assert world.condition("Ready") == ("True", "Succeeded")
        new.load(world.assignment)
        world.run_pass()
        assert world.condition("Ready") == ("True", "Succeeded")
        if turn % 2:
            world.pods.pop(0)
            world.run_pass()
            assert world.condition("Ready") == ("True", "Succeeded")
        writes.append(world.status_writes)
    assert not world.actions(StartSwaps)
