"""Versions that must be signed: refused with the reason on the object, taken once they are, told of in the history."""

from modelswap_engine.protocol.policy import Verification
from modelswap_operator.api.modelversion import ProvenanceStatus, VerificationSpec
from modelswap_operator.planning.actions import StartSwaps, WriteAssignment
from tests.support.slot_steps import started
from tests.support.slot_world import World

SIGNED = VerificationSpec(required=True, keys=("release.pub",))
WIRE = Verification(required=True, keys=("release.pub",))


def slot(**options: int) -> World:
    world = World(pods=2, protocol=3, **options)
    world.settle()
    return world


def test_an_unsigned_version_is_refused_and_the_old_one_serves_on() -> None:
    world = slot()
    world.unsigned.add("1.1")
    world.bump("1.1", verification=SIGNED)
    world.settle()
    assert world.condition("Stalled") == ("True", "SignatureMissing")
    assert world.condition("Serving") == ("True", "PodsServe")
    assert "sign it" in world.status.conditions[0].message
    assert (started(world), world.serving()) == ([], ["1.0", "1.0"])
    world.unsigned.clear()
    world.settle()
    assert world.condition("Stalled") == ("True", "SignatureMissing"), "nobody has said that it is otherwise now"
    world.requested_at = "now"
    world.settle()
    assert world.serving() == ["1.1", "1.1"]
    assert world.condition("Ready") == ("True", "Succeeded")


def test_the_policy_goes_with_the_version_to_pods_and_assignment() -> None:
    world = slot()
    world.bump("1.1", verification=SIGNED)
    world.settle()
    swaps = [order.request for action in world.actions(StartSwaps) for order in action.orders]
    assert {swap.target.verification for swap in swaps} == {WIRE}
    written = world.actions(WriteAssignment)
    candidates = [action.assignment.candidate for action in written if action.assignment.candidate is not None]
    assert {candidate.verification for candidate in candidates} == {WIRE}
    assert world.assignment is not None
    assert world.assignment.stable is not None
    assert world.assignment.stable.verification == WIRE
    assert world.ledger.previous is not None
    assert world.ledger.previous.verification is None, "what was taken before is loaded as it was taken"


def test_another_policy_for_what_is_served_is_for_the_next_version() -> None:
    world = slot()
    revision = world.assignment.revision if world.assignment is not None else 0
    world.unsigned.add("1.0")
    world.edit(verification=SIGNED)
    world.settle()
    assert world.condition("Ready") == ("True", "Succeeded")
    assert world.assignment is not None
    assert world.assignment.stable is not None
    assert world.assignment.stable.verification is None
    assert started(world) == []
    world.bump("1.1")
    world.settle()
    assert world.assignment.revision > revision
    assert world.assignment.stable.verification == WIRE


def test_a_sidecar_that_would_not_notice_is_not_asked() -> None:
    world = slot()
    world.pods[1].protocol = 2
    world.bump("1.1", verification=SIGNED)
    world.settle()
    assert world.condition("Stalled") == ("True", "EngineProtocolUnsupported")
    assert "pod-2" in world.status.conditions[0].message
    assert (started(world), world.serving()) == ([], ["1.0", "1.0"])
    world.pods[1].protocol = 3
    world.requested_at = "now"
    world.settle()
    assert world.serving() == ["1.1", "1.1"]


def test_the_history_says_where_a_version_comes_from_and_who_vouched() -> None:
    world = slot()
    assert (world.status.history[0].provenance, world.status.history[0].signed_by) == (None, "")
    world.origin = {"who": "ci@example.org", "job": "x" * 300, "later": "unknown"}
    world.bump("1.1", verification=SIGNED)
    world.settle()
    entry = world.status.history[0]
    assert (entry.version, entry.signed_by) == ("1.1", "key release.pub")
    assert entry.provenance is not None
    assert (entry.provenance.who, len(entry.provenance.job)) == ("ci@example.org", 256)
    assert isinstance(entry.provenance, ProvenanceStatus)
