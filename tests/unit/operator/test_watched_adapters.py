"""An adapter's source that comes to hold another content, while every pod serves what was looked up."""

from __future__ import annotations

from datetime import timedelta

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_operator.api.loraadapter import SourceSpec
from modelswap_operator.planning.actions import LookAtSource, SendAdapters, StartSwaps
from modelswap_operator.planning.watching import EVERY
from modelswap_operator.status.events import of_adapter
from tests.support.adapter_world import AdapterWorld, source, uri
from tests.support.sim_pod import CATALOG, digest

READY = {"Ready": ("True", "Succeeded")}
DRIFTED = READY | {"SourceDrifted": ("True", "SourceDrifted")}


def at_rest(*names: str, protocol: int = 3) -> AdapterWorld:
    made = AdapterWorld(pods=3, protocol=protocol)
    for name in names or ("a",):
        made.create(name)
    made.settle()
    made.log.clear()
    return made


def pass_time(made: AdapterWorld, time: timedelta = 1.3 * EVERY) -> list[tuple[str, str]]:
    """Let time go by, with a pass a minute, and return who looked at which adapter's source."""
    before, ends = len(made.actions(LookAtSource)), made.now + time
    while made.now < ends:
        made.now += timedelta(minutes=1)
        made.settle()
    return [(look.pod.name, look.adapter) for look in made.actions(LookAtSource)[before:] if look.adapter]


def said(made: AdapterWorld, name: str = "a") -> str:
    return next((c.message for c in made.status_of(name).conditions if c.type == "SourceDrifted"), "")


def read(made: AdapterWorld) -> int:
    return sum(pod.adapters.read for pod in made.pods if pod.adapters is not None)


def test_pods_take_turns_and_read_what_they_have_not_seen_to_be_the_same() -> None:
    made = at_rest()
    writes = made.writes
    looked = pass_time(made, 6 * EVERY)
    assert [name for _, name in looked] == ["a"] * len(looked)
    assert [pod for pod, _ in looked][:3] == ["pod-1", "pod-2", "pod-3"]
    assert len(looked) in (5, 6)
    assert (made.writes, read(made)) == (writes, 1), "the files are those that were read"


def test_another_content_is_said_while_pods_serve_on_and_taken_back_when_the_old_one_is_there_again() -> None:
    made = at_rest()
    pass_time(made)
    before = made.status_of("a")
    made.contents[uri("1")] = digest("9")
    pass_time(made)
    assert said(made).startswith(f"{uri('1')} holds {digest('9')} now and not {digest('1')} any more: pods serve on")
    assert said(made).endswith("put it back, or publish what is there under a name of its own and set spec.sources")
    assert (made.says("a"), made.loaded()) == (DRIFTED, [{"a": "1"}] * 3)
    notes = of_adapter(before, made.status_of("a"))
    assert [(note.reason, note.warning) for note in notes] == [("SourceDrifted", True)]
    assert not [action for action in made.log if isinstance(action, SendAdapters | StartSwaps)]
    writes = made.writes
    pass_time(made, 3 * EVERY)
    assert made.writes == writes, "the same is said once"
    made.contents[uri("1")] = digest("1")
    pass_time(made)
    assert made.says("a") == READY


def test_a_source_that_does_not_answer_says_nothing_and_takes_nothing_back() -> None:
    made = at_rest()
    away = ErrorBody(code="SourceUnreadable", message="503", retryable=True)
    made.contents[uri("1")] = away
    pass_time(made)
    assert made.says("a") == READY
    made.contents[uri("1")] = digest("9")
    pass_time(made)
    made.contents[uri("1")] = away
    pass_time(made)
    assert made.says("a") == DRIFTED


def test_an_operator_that_starts_repeats_what_was_said_until_a_pod_has_looked() -> None:
    made = at_rest()
    made.contents[uri("1")] = digest("9")
    pass_time(made)
    message = said(made)
    made.kill_operator()
    made.run_pass()
    assert said(made) == message
    made.contents[uri("1")] = digest("1")
    pass_time(made)
    assert said(made) == ""


def test_another_source_is_another_matter_and_somebody_who_asks_is_answered_now() -> None:
    made = at_rest("a", "b")
    made.change("b", sources=(source("2"),))
    made.settle()
    made.contents[uri("1")] = digest("9")
    made.ask_again("a", "now")
    made.settle()
    assert (made.says("a"), made.says("b")) == (DRIFTED, READY)
    made.change("a", sources=(source("3"),))
    made.settle()
    assert (made.says("a"), made.loaded()) == (READY, [{"a": "3", "b": "2"}] * 3)


def test_what_cannot_change_or_be_looked_at_is_not_asked_for() -> None:
    made = AdapterWorld(pods=1, protocol=3)
    fixed = SourceSpec(uri=f"hf://org/adapter@{'a' * 40}", digest="")
    made.contents[fixed.uri] = digest("1")
    made.create("a", fixed)
    made.create("b", source("2", base=CATALOG["1.1"].digest))
    made.settle()
    assert pass_time(made, 3 * EVERY) == []
    assert pass_time(at_rest(protocol=2), 3 * EVERY) == [], "older sidecars do not know the route"


def test_one_adapter_is_looked_at_after_the_other() -> None:
    made = at_rest("a", "b", "c")
    made.now += EVERY
    snapshot = made.snapshot()
    made.memory.adapters.looking_at("a")
    for _ in range(5):
        made.run_pass()
    assert not [look for look in made.actions(LookAtSource) if look.adapter], "a's is being read"
    assert snapshot.memory.watched_adapters.keys() == {"a", "b", "c"}
