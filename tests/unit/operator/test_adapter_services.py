"""Which pods the Service of an adapter leads to, as pods load, change, vanish and cannot be asked."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType

import msgspec
import pytest

from modelswap_engine.protocol.adapters import OnIncompatible
from modelswap_operator.api.loraadapter import Placement, ServiceSpec
from modelswap_operator.api.modelversion import AdaptersSpec
from modelswap_operator.planning.actions import Wait
from modelswap_operator.planning.adapter_services import (
    MOST_ENDPOINTS,
    ServiceOutcome,
    WantedService,
    concerned,
    led_away,
    wanted_services,
)
from modelswap_operator.planning.snapshot import Snapshot
from modelswap_operator.runtime.adapter_memory import LED_AWAY
from modelswap_operator.status.adapters import adapter_statuses
from tests.support.adapter_world import AdapterWorld, source
from tests.support.sim_pod import CATALOG

NOTHING: Mapping[str, frozenset[str]] = MappingProxyType({})


def world(**spec: object) -> AdapterWorld:
    made = AdapterWorld(pods=3)
    made.settle()
    made.create("a", service=ServiceSpec(port=80), **spec)  # type: ignore[arg-type]
    made.settle()
    return made


def wanted(made: AdapterWorld, listed: Mapping[str, frozenset[str]] = NOTHING) -> WantedService:
    (found,) = wanted_services(made.snapshot(), listed)
    return found


def pods(made: AdapterWorld, listed: Mapping[str, frozenset[str]] = NOTHING) -> list[str]:
    return [one.name for part in wanted(made, listed).slices for one in part.endpoints]


def test_it_leads_to_the_ready_pods_with_the_adapter_and_to_no_others() -> None:
    made = world(pods=2)
    assert (wanted(made).name, wanted(made).port) == ("a", 80)
    assert pods(made) == ["pod-1", "pod-2"]
    made.pods[0].ready = False
    assert pods(made) == ["pod-2"]
    made.pods[0].ready = True
    made.pods.pop(1)
    made.settle()  # another pod takes its place
    assert pods(made) == ["pod-1", "pod-3"]
    made.pods[0].adapters.served.clear()  # type: ignore[union-attr]
    assert pods(made) == ["pod-3"]


def test_a_pod_that_cannot_be_asked_stays_where_it_was_listed() -> None:
    made = world()
    made.pods[0].reachable = made.pods[1].reachable = False
    assert pods(made) == ["pod-3"]
    assert pods(made, {"a": frozenset({made.pods[0].uid})}) == ["pod-1", "pod-3"]
    made.pods[0].ready = False
    assert pods(made, {"a": frozenset({made.pods[0].uid})}) == ["pod-3"]


def test_new_content_is_led_to_as_soon_as_one_pod_has_it_and_the_old_one_until_then() -> None:
    made = world()
    made.change("a", sources=(source("2"),))
    seen = []
    for _ in range(200):
        made.run_pass()
        seen.append(pods(made))
        assert seen[-1], "nobody is led to"
        made.tick()
    assert made.loaded() == [{"a": "2"}] * 3
    assert seen[-1] == ["pod-1", "pod-2", "pod-3"]


def test_an_adapter_that_is_made_again_is_led_to_where_it_cannot_go_any_more() -> None:
    made = world(pods=1)
    listed = {made.adapters[0].uid: frozenset({made.pods[0].uid})}
    assert pods(made) == ["pod-1"]
    made.remove("a")
    made.run_pass()
    made.create("a", source("1", pin=True), service=ServiceSpec(port=80), pods=1)
    made.adapters = (replace(made.adapters[0], uid="another"),)
    made.pods[0].reachable = False
    assert pods(made, listed) == [], "what was listed was another object's"
    made.pods[0].reachable = True
    seen = []
    for _ in range(20):
        seen.append((pods(made), made.loaded()[0]))
        made.run_pass()
        made.tick()
    assert seen[0] == ([], {"a": "1"}), "it is about to go"
    assert seen[-1] == (["pod-1"], {"a": "1"})
    assert all(loaded for led, loaded in seen if led)


def test_a_pod_that_goes_to_a_base_without_the_adapter_is_led_to_no_more() -> None:
    made = AdapterWorld(pods=2)
    made.edit(adapters=AdaptersSpec(on_incompatible=OnIncompatible.UNLOAD))
    made.settle()
    made.create("a", source("1", base=CATALOG["1.0"].digest), service=ServiceSpec(port=80))
    made.settle()
    made.bump("1.1")
    while not made.pods[0].busy:
        made.run_pass()
    assert (pods(made), made.loaded()) == (["pod-2"], [{"a": "1"}] * 2)


def test_an_adapter_without_a_place_is_led_to_by_nobody() -> None:
    made = world()
    made.create("b", alias="a", service=ServiceSpec(name="other"))
    made.settle()
    first, second = wanted_services(made.snapshot(), NOTHING)
    assert (second.name, second.slices) == ("other", ())
    assert first.slices


def test_slices_are_of_one_family_and_port_and_not_too_long() -> None:
    made = world()
    snapshot = made.snapshot()
    first = snapshot.pods[0]
    many = [replace(first, name=f"p{n:04d}", uid=f"u{n}", ip=f"10.0.{n // 256}.{n % 256}") for n in range(600)]
    others = [
        replace(first, name="six", uid="six", ip="fd00::1"),
        replace(first, name="port", uid="port", data_port=81),
    ]
    (found,) = wanted_services(replace(snapshot, pods=(*many, *others)), NOTHING)
    shape = [(part.name, part.family, part.port, len(part.endpoints)) for part in found.slices]
    assert shape == [
        ("a-ipv4-81-0", "IPv4", 81, 1),
        ("a-ipv4-8000-0", "IPv4", 8000, MOST_ENDPOINTS),
        ("a-ipv4-8000-1", "IPv4", 8000, 100),
        ("a-ipv6-8000-0", "IPv6", 8000, 1),
    ]


def test_who_asks_for_none_is_not_looked_at_and_one_that_was_made_must_go() -> None:
    made = world()
    assert concerned(made.snapshot())
    made.change("a", service=None)
    assert not concerned(made.snapshot())
    assert list(wanted_services(made.snapshot(), NOTHING)) == []
    (adapter,) = made.adapters
    had = replace(adapter, status=msgspec.structs.replace(adapter.status, service="a"))
    made.adapters = (had,)
    assert concerned(made.snapshot())
    assert wanted(made) == WantedService(adapter=had)
    assert not concerned(replace(made.snapshot(), deleted=True))  # nobody can be asked: what is listed stays


def says(snapshot: Snapshot, made: AdapterWorld, outcome: ServiceOutcome) -> tuple[str, dict[str, tuple[str, str]]]:
    ((_, status),) = adapter_statuses(snapshot, made.now, {"a": outcome})
    return status.service, {c.type: (c.status, c.reason) for c in status.conditions}


def test_what_is_wrong_with_the_service_needs_a_person() -> None:
    made = world()
    fine = says(made.snapshot(), made, ServiceOutcome(name="a"))
    assert fine == ("a", {"Ready": ("True", "Succeeded")})
    taken = says(made.snapshot(), made, ServiceOutcome(reason="ServiceTaken", message="Service a was not made for"))
    assert taken == ("", {"Ready": ("False", "ServiceTaken"), "Stalled": ("True", "ServiceTaken")})


def leads(made: AdapterWorld) -> set[str]:
    return {pod.name for pod in made.pods if pod.uid in made.led_to.get("a", ())}


def serves(made: AdapterWorld) -> set[str]:
    return {pod.name for pod, names in zip(made.pods, made.loaded(), strict=True) if "a" in names}


@pytest.mark.parametrize("before", [3, "All"])
def test_a_pod_that_is_to_lose_it_is_led_to_no_more_for_a_while_before_it_does(before: int | str) -> None:
    made = world(pods=before)
    made.change("a", placement=Placement(pods=1))
    unled: dict[str, datetime] = {}
    for _ in range(200):
        action = made.run_pass()
        assert leads(made) <= serves(made), "a request could be led to a pod without the adapter"
        assert leads(made)
        unled |= dict.fromkeys(serves(made) - leads(made) - set(unled), made.now)
        for name in set(unled) - serves(made):
            assert made.now - unled.pop(name) >= LED_AWAY
        if isinstance(action, Wait):
            made.tick() if any(pod.loading for pod in made.pods) else None
            if action.until is None and not any(pod.loading for pod in made.pods):
                break
            made.now = max(made.now, min(action.until or made.now, made.now + timedelta(seconds=1)))
    assert (leads(made), serves(made)) == ({"pod-1"}, {"pod-1"})
    assert not unled
    assert made.message("a") == "1/1 pods serve it"


def test_a_pod_that_is_wanted_again_before_it_is_gone_keeps_it() -> None:
    made = world(pods=3)
    made.change("a", placement=Placement(pods=2))
    for _ in range(3):
        made.run_pass()
    assert (leads(made), serves(made)) == ({"pod-1", "pod-2"}, {"pod-1", "pod-2", "pod-3"})
    revision = made.assignment.adapters_revision if made.assignment is not None else 0
    made.change("a", placement=Placement(pods=3))
    made.settle()
    assert leads(made) == serves(made) == {"pod-1", "pod-2", "pod-3"}
    assert made.assignment is not None
    assert made.assignment.adapters_revision == revision, "nothing was decided, so nothing was unloaded"


def test_an_operator_that_is_killed_meanwhile_leads_away_first_all_the_same() -> None:
    made = world(pods=3)
    made.change("a", placement=Placement(pods=2))
    for _ in range(10):
        made.run_pass()
        made.now += timedelta(seconds=1)
        made.kill_operator()
        made.led_to = {}
        assert serves(made) == {"pod-1", "pod-2", "pod-3"}
    made.settle()
    assert serves(made) == {"pod-1", "pod-2"}


def test_the_last_pod_that_is_led_to_keeps_it_until_another_can_answer() -> None:
    made = world(pods=2)
    made.pods[0].ready = False
    made.change("a", placement=Placement(pods=1))
    made.rest()
    assert (leads(made), serves(made)) == ({"pod-2"}, {"pod-1", "pod-2"})
    made.pods[0].ready = True
    made.rest()
    assert (leads(made), serves(made)) == ({"pod-1"}, {"pod-1"})


def test_without_a_service_nothing_is_waited_for() -> None:
    made = world(pods=3)
    made.change("a", placement=Placement(pods=1), service=None)
    before = made.now
    made.settle()
    assert serves(made) == {"pod-1"}
    assert made.now - before < LED_AWAY


@pytest.mark.parametrize(
    ("outcome", "listed", "service", "away"),
    [
        (ServiceOutcome(name="a"), {"a": {"uid-1", "uid-2"}}, "a", {"uid-2", "uid-3"}),
        (ServiceOutcome(reason="ServiceRefused"), {"a": {"uid-1", "uid-2"}}, "a", {"uid-3"}),
        (ServiceOutcome(reason="ServiceTaken"), {}, "a", {"uid-2", "uid-3"}),
        (ServiceOutcome(reason="ServiceRefused"), None, "a", set()),
        (ServiceOutcome(reason="ServiceRefused"), None, "", {"uid-2", "uid-3"}),
    ],
)
def test_a_service_that_could_not_be_written_still_leads_where_it_did(
    outcome: ServiceOutcome, listed: dict[str, set[str]] | None, service: str, away: set[str]
) -> None:
    (adapter,) = world().snapshot().adapters
    adapter = replace(adapter, uid="a", status=msgspec.structs.replace(adapter.status, service=service))
    wanted = WantedService(adapter=adapter, name="a", left=frozenset({"uid-2", "uid-3"}))
    known = None if listed is None else {uid: frozenset(pods) for uid, pods in listed.items()}
    assert led_away(wanted, outcome, known) == away


def test_one_that_cannot_leave_is_not_looked_at_all_the_time() -> None:
    made = world(pods=2)
    made.pods[0].ready = False
    made.change("a", placement=Placement(pods=1))
    made.rest()
    action = made.run_pass()
    assert isinstance(action, Wait)
    assert action.until is not None
    assert action.until - made.now >= timedelta(seconds=5)
