"""Who decides and what counts: adoption, release, old leaders, lost assignments, and what Ready may be said of."""

from dataclasses import replace
from datetime import timedelta

import pytest

from modelswap_engine.protocol.engine_state import EngineState, RankState
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.fence import Accepted
from modelswap_operator.api.modelversion import Rollout
from modelswap_operator.planning.actions import Wait
from modelswap_operator.planning.assess import Assessment, proved
from tests.support.sim_pod import GOOD, digest
from tests.support.slot_steps import started
from tests.support.slot_world import World


def test_pods_that_serve_the_wanted_version_are_adopted_without_a_swap() -> None:
    world = World(pods=2, serving="1.0", version="1.0")
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")
    assert world.condition("WeightsVerified") == ("True", "ProvedByEngines")
    assert started(world) == []
    assert world.assignment is not None
    assert world.assignment.stable == GOOD["1.0"].target
    assert world.status.observed_generation == 1
    assert world.status.stable is not None
    assert world.status.stable.digest == digest("a")


def test_no_pods_yet_waits_until_the_deadline_and_scaled_to_zero_is_ready() -> None:
    world = World(pods=0)
    world.run_pass()
    assert world.condition("Reconciling") == ("True", "WaitingForPods")
    world.now += timedelta(seconds=700)
    world.run_pass()
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    pod = world.add_pod(GOOD["1.0"])
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")
    world.pods.remove(pod)
    world.settle()
    assert world.condition("Ready") == ("True", "ScaledToZero")


def test_pods_never_ready_are_counted_apart() -> None:
    world = World(pods=2)
    world.settle()
    world.add_pod(None, ready=False).reachable = False
    for _ in range(5):
        world.run_pass()
    assert world.condition("Ready") == ("True", "Succeeded")
    counts = world.status.pod_counts
    assert counts is not None
    assert (counts.total, counts.counted, counts.ready, counts.excluded) == (3, 2, 2, 1)


def test_deletion_releases_the_assignment_once_and_recreation_takes_it_over_above() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.settle()
    world.deleted = True
    world.settle()
    assert world.assignment is not None
    assert (world.assignment.released, world.assignment.stable) == (True, GOOD["1.1"].target)
    world.deleted, world.uid, world.generation = False, "owner-2", 1
    world.status = type(world.status)()
    for pod in world.pods:  # the sidecar sees the release in its mounted file
        assert pod.accepted is not None
        pod.accepted = type(pod.accepted)(revision=world.assignment.revision, epoch=1, released=True)
    world.bump("1.0")
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    assert world.revisions == sorted(set(world.revisions))


def test_steady_state_writes_nothing() -> None:
    world = World(pods=3)
    world.settle()
    world.bump("1.1")
    world.settle()
    writes = world.status_writes
    for _ in range(20):
        world.now += timedelta(seconds=60)
        world.run_pass()
    world.kill_operator()
    for _ in range(5):
        world.now += timedelta(seconds=60)
        world.run_pass()
    assert world.status_writes == writes


def test_ready_is_not_true_for_a_pod_that_has_not_proved_its_boot() -> None:
    world = World(pods=2)
    world.settle()
    world.pods[1].boot += 1
    world.pods[1].live = None
    world.run_pass()
    assert world.condition("Ready") == ("Unknown", "Progressing")
    assert world.condition("WeightsVerified") == ("Unknown", "NotProved")


def test_an_old_leader_does_not_release_what_a_newer_one_decided() -> None:
    world = World(pods=2)
    world.settle()
    world.epoch, current = 0, world.assignment
    world.deleted = True
    assert isinstance(world.run_pass(), Wait)
    assert world.assignment is current


def test_an_old_leader_does_nothing() -> None:
    world = World(pods=2)
    world.settle()
    world.epoch, current = 0, world.assignment
    world.bump("1.1")
    action = world.run_pass()
    assert isinstance(action, Wait)
    assert world.assignment is current


def test_a_lost_configmap_is_written_again_above_what_pods_have_accepted() -> None:
    world = World(pods=2)
    world.settle()
    world.bump("1.1")
    world.settle()
    seen = max(p.accepted.revision for p in world.pods if p.accepted)
    world.assignment, world.ledger = None, type(world.ledger)()
    world.settle()
    assert world.assignment is not None
    assert world.assignment.revision > seen
    assert world.condition("Ready") == ("True", "Succeeded")


def test_an_outdated_candidate_is_withdrawn_although_nobody_can_be_asked() -> None:
    world = World(pods=1)
    world.settle()
    world.bump("2.1")
    for _ in range(2):
        world.run_pass()
    world.pods[0].restart()
    world.tick()
    assert world.pods[0].reason == "LoadFailed"
    world.bump("1.2")
    world.settle()
    assert world.serving() == ["1.2"]


def test_an_edit_that_changes_no_version_does_not_make_it_stable_anew() -> None:
    world = World(pods=1)
    world.settle()
    assert world.status.stable is not None
    before = world.status.stable.revision
    world.edit(rollout=Rollout(progress_deadline_seconds=300))
    world.settle()
    assert world.status.stable.revision == before
    assert world.assignment is not None
    assert world.assignment.revision > before


def test_a_swap_by_a_person_is_undone_under_a_higher_revision() -> None:
    world = World(pods=2)
    world.settle()
    revision = world.revisions[-1] + 5
    world.pods[0].live = GOOD["1.2"]
    world.pods[0].accepted = Accepted(owner_uid=world.uid, epoch=world.epoch, revision=revision)
    world.settle()
    assert world.serving() == ["1.0", "1.0"]
    assert world.revisions[-1] > revision


RANK = RankState(rank=0, boot_id="r0", alive=True, digest=digest("a"))


@pytest.mark.parametrize(
    ("ranks", "boot_id", "quarantined", "expected"),
    [
        ([RANK, RANK], "b", False, True),
        ([], "b", False, False),
        ([RANK], "", False, False),
        ([RANK], "b", True, False),
        ([RANK, RankState(rank=1, boot_id="r1", alive=True, digest="")], "b", False, False),
        ([RANK, RankState(rank=1, boot_id="r1", alive=False, digest=digest("a"))], "b", False, False),
        ([RANK, RankState(rank=1, boot_id="", alive=True, digest=digest("a"))], "b", False, False),
    ],
)
def test_a_digest_is_proved_by_every_rank_under_its_boot_id(
    ranks: list[RankState], boot_id: str, quarantined: bool, expected: bool
) -> None:
    live = VersionRef(version="1.0", uri="u", digest=digest("a"))
    state = EngineState(boot_id=boot_id, live=live, ranks=ranks, quarantined=quarantined)
    assert proved(state, digest("a")) is expected
    assert not proved(state, digest("b"))
    assert not proved(state, "")


def test_a_moment_without_pods_in_mid_rollout_is_not_ready() -> None:
    world = World(pods=1)
    world.settle()
    world.bump("1.1")
    for _ in range(3):
        world.run_pass()
    old = world.pods.pop()
    for _ in range(3):
        world.run_pass()
    assert world.condition("Ready") == ("Unknown", "WaitingForPods")
    world.pods.append(old)
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")


def test_pods_that_are_leaving_are_not_none() -> None:
    world = World(pods=1)
    world.settle()
    snapshot = world.snapshot()
    leaving = replace(snapshot, pods=tuple(replace(p, terminating=True) for p in snapshot.pods))
    assert not Assessment(leaving).scaled_to_zero
    assert Assessment(replace(snapshot, pods=())).scaled_to_zero


def test_a_quarantined_pod_that_was_never_ready_is_not_counted_by_the_next_process() -> None:
    world = World(pods=1)
    world.settle()
    world.add_pod(GOOD["1.0"], ready=False).quarantined = True
    for _ in range(2):
        world.run_pass()
        world.kill_operator()
    counts = world.status.pod_counts
    assert counts is not None
    assert (counts.counted, counts.excluded) == (1, 1)
