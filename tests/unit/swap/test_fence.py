"""Who may change a pod, and when a decision is too old."""

import pytest

from modelswap_engine.protocol.errors import ForeignOwner, StaleRevision, StateMoved, WrongPod
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.swap.fence import Accepted, accept, check_control, check_match, check_order, check_pod

A = VersionRef(version="1", uri="file:///a", digest="sha256:a")
B = VersionRef(version="2", uri="file:///b", digest="sha256:b")


def fence(owner="me", epoch=2, revision=7, pod="p"):
    return Fence(pod_uid=pod, owner_uid=owner, epoch=epoch, revision=revision)


def accepted(owner="me", epoch=2, revision=7, operation_id="op", target=A, released=False):
    return Accepted(
        owner_uid=owner, epoch=epoch, revision=revision, operation_id=operation_id, target=target, released=released
    )


def test_another_pods_uid_is_the_wrong_pod():
    check_pod(fence(), "p")
    with pytest.raises(WrongPod) as refused:
        check_pod(fence(), "q")
    assert refused.value.status == 421


def test_the_first_decision_is_anybodys():
    check_order(fence(), None, target=A)
    check_order(fence(owner="cli", revision=0), None, target=A)


@pytest.mark.parametrize(("epoch", "revision"), [(2, 8), (3, 7), (3, 1)])
def test_a_newer_decision_passes(epoch, revision):
    check_order(fence(epoch=epoch, revision=revision), accepted(), target=B)


@pytest.mark.parametrize(("epoch", "revision"), [(2, 6), (1, 7), (1, 100)])
def test_an_older_decision_is_stale(epoch, revision):
    with pytest.raises(StaleRevision) as refused:
        check_order(fence(epoch=epoch, revision=revision), accepted(), target=A)
    assert refused.value.status == 409


def test_the_same_decision_may_be_tried_again_but_not_with_another_target():
    check_order(fence(), accepted(), target=A)
    with pytest.raises(StaleRevision):
        check_order(fence(), accepted(), target=B)


def test_a_mutable_source_is_compared_by_place_while_its_digest_is_unknown():
    unpinned = VersionRef(uri="file:///a")
    check_order(fence(), accepted(target=unpinned), target=A)
    with pytest.raises(StaleRevision):
        check_order(fence(), accepted(target=unpinned), target=B)


def test_what_was_taken_over_from_an_assignment_does_not_bind_the_target():
    check_order(fence(), accepted(operation_id=""), target=B)
    with pytest.raises(StaleRevision):
        check_order(fence(revision=6), accepted(operation_id=""), target=B)


def test_another_owner_is_foreign_until_the_pod_is_released():
    with pytest.raises(ForeignOwner) as refused:
        check_order(fence(owner="you", epoch=9, revision=99), accepted(), target=B)
    assert refused.value.status == 409
    check_order(fence(owner="you", epoch=1, revision=1), accepted(released=True), target=B)


def test_an_old_leader_of_the_owner_that_released_stays_old():
    with pytest.raises(StaleRevision):
        check_order(fence(revision=6), accepted(released=True), target=A)


def test_a_person_needs_a_higher_revision_where_an_owner_is():
    check_order(fence(owner="cli", epoch=0, revision=8), accepted(), target=B)
    for revision in (0, 7):
        with pytest.raises(StaleRevision):
            check_order(fence(owner="cli", epoch=0, revision=revision), accepted(), target=A)


def test_a_person_is_free_where_no_owner_is():
    mine = accept(fence(owner="cli", epoch=0, revision=5), None, operation_id="op", target=A)
    check_order(fence(owner="cli", epoch=0, revision=0), mine, target=B)
    check_order(fence(owner="me", epoch=1, revision=1), mine, target=B)


def test_breaking_glass_raises_the_revision_and_leaves_the_owner():
    after = accept(fence(owner="cli", epoch=0, revision=8), accepted(), operation_id="op2", target=B)
    assert (after.owner_uid, after.epoch, after.revision) == ("me", 2, 8)
    check_order(fence(revision=9), after, target=A)
    with pytest.raises(StaleRevision):
        check_order(fence(revision=7), after, target=A)
    with pytest.raises(ForeignOwner):
        check_order(fence(owner="you", revision=10), after, target=A)


def test_an_owners_decision_is_remembered_as_it_is():
    after = accept(fence(epoch=3, revision=9), accepted(), operation_id="op2", target=B)
    assert after == accepted(epoch=3, revision=9, operation_id="op2", target=B)


def test_cancelling_takes_the_same_standing():
    check_control(fence(), accepted())
    check_control(fence(owner="cli", epoch=0, revision=0), accepted())
    with pytest.raises(ForeignOwner):
        check_control(fence(owner="you"), accepted())
    with pytest.raises(StaleRevision):
        check_control(fence(epoch=1), accepted())


@pytest.mark.parametrize("tag", ['"boot.4"', 'W/"boot.4"', "boot.4", "*", None])
def test_a_tag_that_matches_passes(tag):
    check_match(tag, '"boot.4"')


def test_a_tag_that_moved_on_is_refused():
    with pytest.raises(StateMoved) as refused:
        check_match('"boot.3"', '"boot.4"')
    assert refused.value.status == 412
