"""What a process that starts must serve: the newer of journal and assignment file, else its template."""

import msgspec
import pytest

from modelswap_engine.protocol.assignment import Assignment, AssignmentCandidate, AssignmentTarget
from modelswap_engine.protocol.errors import InsufficientMemory, InvalidCheckpoint, NotReady, SourceUnreadable
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.fence import Accepted
from modelswap_engine.swap.records import Intent, JournalState
from modelswap_engine.swap.startup import choose, interrupted, takeover

TEMPLATE = VersionRef(version="0", uri="file:///template")
POD = "pod-1"


def ref(name):
    return VersionRef(version=name, uri=f"file:///{name}", digest=f"sha256:{name}")


def assignment(revision, *, stable="stable", candidate=None, pods=(POD,), owner="me", epoch=1, released=False):
    def fields(name):
        return {"version": name, "uri": f"file:///{name}", "digest": f"sha256:{name}"}

    return Assignment(
        owner_uid=owner,
        epoch=epoch,
        revision=revision,
        stable=AssignmentTarget(**fields(stable)) if stable else None,
        candidate=AssignmentCandidate(pod_uids=list(pods), **fields(candidate)) if candidate else None,
        released=released,
    )


def journal(revision, *, served="old", target="new", state=None, error=None, owner="me", operation_id="op", **more):
    accepted = Accepted(owner_uid=owner, epoch=1, revision=revision, operation_id=operation_id, target=ref(target))
    outcomes = ()
    if state is not None:
        body = error.body() if error is not None else None
        outcomes = (SwapStatus(operation_id=operation_id, state=state, target=ref(target), error=body),)
    return JournalState(
        accepted=accepted, served=ref(served) if served else None, outcomes=outcomes, template=TEMPLATE.uri, **more
    )


def chosen(journal=None, assignment=None, template=TEMPLATE):
    journal = journal or JournalState()
    return choose(journal=journal, assignment=assignment, template=template, pod_uid=POD).target


def test_nothing_assigned_and_nothing_journaled_is_the_template():
    assert chosen() == TEMPLATE


def test_the_file_decides_on_a_new_pod():
    choice = choose(journal=JournalState(), assignment=assignment(3), template=TEMPLATE, pod_uid=POD)
    assert choice.target == ref("stable")
    assert (choice.adopted.owner_uid, choice.adopted.revision, choice.adopted.operation_id) == ("me", 3, "")


def test_a_pod_named_as_candidate_serves_the_candidate_and_others_stable():
    assert chosen(assignment=assignment(3, candidate="next")) == ref("next")
    assert chosen(assignment=assignment(3, candidate="next", pods=["other"])) == ref("stable")


def test_a_late_file_does_no_harm():
    assert chosen(journal(5, served="new", state=SwapState.SERVING), assignment(4)) == ref("new")


def test_a_newer_file_beats_the_journal():
    assert chosen(journal(5, served="new", state=SwapState.SERVING), assignment(6)) == ref("stable")


def test_the_same_revision_follows_the_file_where_the_swap_was_cut_short():
    assert chosen(journal(5), assignment(5, candidate="new")) == ref("new")


def test_a_candidate_that_was_proved_bad_here_falls_back_to_stable():
    bad = journal(5, state=SwapState.ABORTED, error=InvalidCheckpoint("truncated"))
    assert chosen(bad, assignment(5, candidate="new")) == ref("stable")
    unlucky = journal(5, state=SwapState.ABORTED, error=SourceUnreadable("network"))
    assert chosen(unlucky, assignment(5, candidate="new")) == ref("new")


def outcome(name, state, error=None):
    return SwapStatus(
        operation_id=f"op-{name}-{state}", state=state, target=ref(name), error=error.body() if error else None
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([outcome("new", SwapState.ABORTED, InvalidCheckpoint("x")), outcome("stable", SwapState.SERVING)], "stable"),
        ([outcome("new", SwapState.ABORTED, InvalidCheckpoint("x")), outcome("new", SwapState.SERVING)], "new"),
        (
            [
                outcome("new", SwapState.ABORTED, InvalidCheckpoint("x")),
                outcome("new", SwapState.ROLLED_BACK, NotReady("restarted")),
            ],
            "stable",
        ),
        ([outcome("new", SwapState.ABORTED, InsufficientMemory("now"))], "new"),
    ],
)
def test_a_candidate_stays_refused_after_later_decisions_until_it_has_served(outcomes, expected):
    before = msgspec.structs.replace(journal(5, operation_id="", target="stable"), outcomes=tuple(outcomes))
    assert chosen(before, assignment(5, candidate="new")) == ref(expected)


def test_without_a_file_the_journal_says_what_was_served():
    assert chosen(journal(5, served="new", state=SwapState.SERVING)) == ref("new")
    assert chosen(journal(5, state=SwapState.ABORTED, error=InvalidCheckpoint("x"))) == ref("old")
    assert chosen(journal(5)) == ref("old")


def test_a_swap_cut_short_after_its_intent_may_have_been_seen_and_goes_on():
    intent = Intent(operation_id="op", source=ref("old"), target=ref("new"))
    assert chosen(journal(5, intent=intent)) == ref("new")


def test_an_assignment_seen_once_binds_when_the_file_is_gone():
    assert chosen(journal(5, operation_id="", served="old")) == ref("new")
    assert chosen(journal(5, served=None)) == ref("new")


def test_a_persons_swap_survives_a_restart_but_not_another_model_on_the_command_line():
    by_hand = journal(0, owner="cli", served="new", state=SwapState.SERVING)
    assert chosen(by_hand) == ref("new")
    other = VersionRef(version="x", uri="file:///other")
    assert chosen(by_hand, template=other) == other


def test_a_first_assignment_beats_what_a_person_did_before():
    assert chosen(journal(9, owner="cli", served="new"), assignment(1)) == ref("stable")


def test_a_released_assignment_still_says_what_to_serve_but_not_over_a_person():
    assert chosen(assignment=assignment(4, released=True)) == ref("stable")
    assert chosen(journal(9, owner="cli", served="new"), assignment(4, released=True)) == ref("new")


def test_an_assignment_without_targets_decides_nothing():
    assert chosen(assignment=assignment(4, stable=None)) == TEMPLATE


@pytest.mark.parametrize(
    ("intent", "live", "state"),
    [
        (False, "sha256:old", SwapState.ABORTED),
        (True, "sha256:old", SwapState.ROLLED_BACK),
        (True, "sha256:new", SwapState.SERVING),
        (False, "sha256:new", SwapState.SERVING),
    ],
)
def test_an_operation_cut_short_ends_as_what_is_live_says(intent, live, state):
    found = Intent(operation_id="op", source=ref("old"), target=ref("new")) if intent else None
    status = interrupted(journal(5, intent=found), live=live, at="now")
    assert status.state is state
    assert (status.error is None) == (state is SwapState.SERVING)
    assert status.revision == 5


def test_an_operation_that_ended_was_not_cut_short():
    assert interrupted(journal(5, state=SwapState.ABORTED), live="sha256:old", at="now") is None
    assert interrupted(journal(5, operation_id=""), live="sha256:old", at="now") is None
    assert interrupted(JournalState(), live="sha256:old", at="now") is None


def test_a_released_file_of_the_owner_opens_the_pod():
    held = journal(5).accepted
    assert takeover(held, assignment(5, released=True), pod_uid=POD).released
    assert takeover(held, assignment(4, released=True), pod_uid=POD) is None
    assert takeover(held, assignment(6), pod_uid=POD) is None
    assert takeover(held, None, pod_uid=POD) is None


def test_a_newer_file_of_another_owner_takes_the_pod_over():
    held = journal(5).accepted
    taken = takeover(held, assignment(6, owner="you"), pod_uid=POD)
    assert (taken.owner_uid, taken.revision, taken.target) == ("you", 6, ref("stable"))
    assert takeover(held, assignment(5, owner="you"), pod_uid=POD) is None
