"""A source that comes to hold another content under its name, while every pod serves what was resolved."""

from dataclasses import replace
from datetime import timedelta

import pytest

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.protocol.messages import VersionRef
from modelswap_operator.planning import watching
from modelswap_operator.planning.actions import LookAtSource, SendAdapters, StartSwaps, Wait
from modelswap_operator.planning.snapshot import Memory, Watched
from modelswap_operator.planning.watching import EVERY
from modelswap_operator.status.events import of_status
from tests.support import sim_pod
from tests.support.sim_pod import GOOD, Release, digest
from tests.support.slot_world import START, World

URI = GOOD["1.0"].uri
REF = VersionRef(version="1.0", uri=URI, digest=digest("a"))
AWAY = ErrorBody(code="SourceUnreadable", message="503", retryable=True)


def at_rest(**arguments: object) -> World:
    world = World(**({"pods": 3, "protocol": 3} | arguments))  # type: ignore[arg-type]
    world.settle()
    world.log.clear()
    return world


def pass_time(world: World, time: timedelta = 1.3 * EVERY) -> list[str]:
    """Let time go by, with a pass a minute, and return which pods looked."""
    before, ends = len(world.actions(LookAtSource)), world.now + time
    while world.now < ends:
        world.now += timedelta(minutes=1)
        world.settle()
    return [action.pod.name for action in world.actions(LookAtSource)[before:]]


def said(world: World) -> str:
    return next((c.message for c in world.status.conditions if c.type == "SourceDrifted"), "")


def test_one_pod_of_a_slot_looks_each_time_another_and_a_look_writes_nothing() -> None:
    world = at_rest()
    writes = world.status_writes
    looked = pass_time(world, 6 * EVERY)
    assert looked in (["pod-1", "pod-2", "pod-3"] * 2, ["pod-1", "pod-2", "pod-3", "pod-1", "pod-2"])
    assert world.status_writes == writes
    assert said(world) == ""


def test_another_content_is_said_while_pods_serve_on_and_taken_back_when_the_old_one_is_there_again() -> None:
    world = at_rest()
    world.moved[URI] = digest("9")
    before = world.status
    pass_time(world)
    text = f"{URI} holds {digest('9')} now and not {digest('a')} (1.0) any more: pods serve on"
    assert said(world).startswith(text)
    assert "put it back, or publish what is there under a name of its own" in said(world)
    assert [(note.reason, note.warning) for note in of_status(before, world.status)] == [("SourceDrifted", True)]
    assert (world.condition("Ready"), world.condition("Stalled")) == (("True", "Succeeded"), None)
    assert not world.actions(StartSwaps)
    writes = world.status_writes
    pass_time(world)
    assert world.status_writes == writes, "the same is said once"
    world.moved.clear()
    pass_time(world)
    assert world.condition("SourceDrifted") is None


def test_files_that_were_written_again_are_a_suspicion_until_a_pod_has_read_them_and_it_is_told_once() -> None:
    world = at_rest()
    world.write_again(URI)
    before = world.status
    pass_time(world)
    assert said(world).startswith(f"{URI} has other files (weights) than those that {digest('a')} (1.0) was read from;")
    assert "whether the tensors differ is not known until they are read" in said(world)
    writes = world.status_writes
    pass_time(world, 6 * EVERY)
    assert world.status_writes == writes, "pods that all resolved the former files agree"
    world.pods[1].outdated = False
    pass_time(world, 4 * EVERY)
    assert (world.condition("SourceDrifted"), world.status_writes) == (None, writes + 1)
    pass_time(world, 8 * EVERY)
    assert (world.condition("SourceDrifted"), world.status_writes) == (None, writes + 1)
    world.write_again(URI)
    pass_time(world)
    assert of_status(before, world.status)[0].reason == "SourceDrifted", "others again are another suspicion"


def test_a_digest_is_believed_whatever_was_found_out_before_and_until_it_is_gone() -> None:
    world = at_rest(pods=2)
    world.write_again(URI)
    pass_time(world)
    world.pods[0].outdated = world.pods[1].outdated = False
    pass_time(world)
    assert world.condition("SourceDrifted") is None
    world.moved[URI] = digest("9")
    pass_time(world)
    writes = world.status_writes
    world.pods[0].outdated = True
    pass_time(world, 6 * EVERY)
    assert (world.condition("SourceDrifted"), world.status_writes) == (("True", "SourceDrifted"), writes)
    world.moved.clear()
    pass_time(world, 4 * EVERY)
    assert world.condition("SourceDrifted") is None, "what is there was found to be the same before"


def test_former_files_that_are_back_say_nothing_of_those_that_were_there_meanwhile() -> None:
    known = Watched(uri=URI, digest=digest("a"), due=World().now)
    others = SourceLook(found="other files (weights)", revision="new")
    suspected = watching.told(known, others)
    back = watching.told(suspected, SourceLook(revision="former"))
    assert (back.found, watching.told(back, others).found) == ("", others.found)
    unnamed = SourceLook(found=others.found)
    back = watching.told(watching.told(known, unnamed), SourceLook())
    assert watching.told(back, unnamed).found == others.found, "files that nothing names are not remembered"


def test_so_many_files_are_remembered_and_no_more() -> None:
    known = Watched(uri=URI, digest=digest("a"), due=World().now)
    for number in range(3 * watching.CLEARED):
        known = watching.told(known, SourceLook(found="other files (weights)", revision=str(number)))
        assert known.found
        known = watching.told(known, SourceLook(revision=str(number)))
    assert known.cleared == tuple(str(number) for number in range(3 * watching.CLEARED))[-watching.CLEARED :]


def test_what_a_new_version_leaves_behind_is_nobodys_concern() -> None:
    world = at_rest()
    world.moved[URI] = digest("9")
    pass_time(world)
    assert world.condition("SourceDrifted") == ("True", "SourceDrifted")
    world.bump("1.1")
    world.settle()
    assert world.condition("SourceDrifted") is None
    assert [a.request.target.uri for a in (pass_time(world), world.actions(LookAtSource))[1]][-1] == GOOD["1.1"].uri


def test_a_source_that_does_not_answer_has_not_moved_nor_come_back() -> None:
    world = at_rest()
    world.moved[URI] = AWAY
    assert pass_time(world)
    assert world.condition("SourceDrifted") is None
    world.moved[URI] = digest("9")
    pass_time(world)
    world.moved[URI] = AWAY
    assert pass_time(world)
    assert world.condition("SourceDrifted") == ("True", "SourceDrifted")


def test_another_operator_repeats_it_until_a_pod_has_looked() -> None:
    world = at_rest()
    world.moved[URI] = digest("9")
    pass_time(world)
    world.kill_operator()
    writes = world.status_writes
    world.run_pass()
    assert (world.condition("SourceDrifted"), world.status_writes) == (("True", "SourceDrifted"), writes)
    world.moved.clear()
    pass_time(world)
    assert world.condition("SourceDrifted") is None


def test_somebody_who_asks_has_it_looked_at_now() -> None:
    world = at_rest()
    world.requested_at = "now"
    world.settle()
    assert len(world.actions(LookAtSource)) == 1
    world.settle()
    assert len(world.actions(LookAtSource)) == 1


@pytest.mark.parametrize("arguments", [{"protocol": 2}, {"serving": "1.1", "max_unavailable": 1}])
def test_pods_that_cannot_look_or_are_on_their_way_are_not_asked(arguments: dict[str, object]) -> None:
    world = World(**({"pods": 2, "protocol": 3} | arguments))  # type: ignore[arg-type]
    for _ in range(6):
        world.run_pass()
        world.now += 2 * EVERY if arguments == {"protocol": 2} else timedelta(0)
    assert not world.actions(LookAtSource)


@pytest.mark.parametrize(
    ("uri", "asked"),
    [
        ("hf://org/model@0123456789abcdef0123456789abcdef01234567/folder", 0),
        ("hf://org/model@0123456789abcdef0123456789abcdef01234567", 0),
        ("hf://org/model@main/0123456789abcdef0123456789abcdef01234567", 1),
        (f"oci://registry.example/models/chat:1.0@sha256:{'a' * 64}", 0),
        ("oci://registry.example/models/chat:1.0", 1),
        ("s3://bucket/chat/1.0", 1),
    ],
)
def test_what_names_its_content_itself_is_not_asked(uri: str, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Release):
        @property
        def uri(self) -> str:
            return uri

    monkeypatch.setitem(sim_pod.CATALOG, "1.0", Elsewhere("1.0", digest("a")))
    world = at_rest()
    assert bool(pass_time(world)) == bool(asked)
    assert not world.actions(SendAdapters)
    assert isinstance(world.run_pass(), Wait)


def test_a_look_that_could_not_tell_is_repeated_soon_and_less_and_less_often() -> None:
    known = Watched(uri=URI, digest=digest("a"), due=START)
    waits = []
    for _ in range(15):
        known = watching.answered(watching.asked(known), REF, AWAY, now=START, random=0.99)
        waits.append(known.due - START)
    assert waits[0] <= timedelta(seconds=1)
    assert waits == sorted(waits)
    assert EVERY / 2 < waits[-1] <= EVERY
    known = watching.answered(watching.asked(known), REF, SourceLook(), now=START, random=0.5)
    assert (known.due, known.failures) == (START + EVERY, 0)


def test_who_asks_while_a_pod_looks_gets_a_look_that_began_afterwards() -> None:
    world = at_rest()
    looking = watching.asked(Watched(uri=URI, digest=digest("a"), due=START))
    asked = replace(world.snapshot(), requested_at="now", memory=Memory(watched=looking))
    known = watching.watched(asked, START)
    assert known is not None
    assert watching.answered(known, REF, SourceLook(), now=START, random=0.5).due == START


def test_an_answer_that_comes_while_a_pass_looks_at_the_slot_is_kept() -> None:
    world = at_rest()
    action = LookAtSource(pod=world.snapshot().pods[0], request=LookRequest(target=REF))
    world.memory.looking(action)
    begun = world.snapshot()
    assert begun.memory.watched is not None
    assert begun.memory.watched.asked
    world.memory.looked(action, SourceLook(found=digest("9")), now=world.now, random=0.5)
    known = world.memory.take_in(begun, world.now).memory.watched
    assert known is not None
    assert (known.asked, known.found) == (False, digest("9"))
