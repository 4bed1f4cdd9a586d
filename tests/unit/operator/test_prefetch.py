"""Versions that pods fetch ahead: each pod is told once, nothing waits for it, and the status says how far it is."""

import msgspec

from modelswap_engine.protocol.errors import ErrorBody
from modelswap_engine.protocol.prefetch import PrefetchPhase
from modelswap_operator.api.modelversion import Source
from modelswap_operator.planning.actions import SendPrefetch
from tests.support.slot_world import World

NEXT, LATER = Source(uri="s3://b/1.2", digest="sha256:" + "2" * 64), Source(uri="s3://b/1.3")


def asking(*sources: Source, **arguments: object) -> World:
    world = World(**({"pods": 3, "protocol": 3} | arguments))  # type: ignore[arg-type]
    world.settle()
    world.log.clear()
    world.edit(prefetch=sources)
    return world


def uris(world: World) -> list[list[str]]:
    return [[row.target.uri for row in pod.prefetch] for pod in world.pods]


def note(world: World, pod: int, row: int, **changes: object) -> None:
    rows = world.pods[pod].prefetch
    rows[row] = msgspec.structs.replace(rows[row], **changes)


def test_each_pod_is_told_once_in_the_order_of_the_spec() -> None:
    world = asking(NEXT, LATER)
    world.settle()
    assert uris(world) == [[NEXT.uri, LATER.uri]] * 3
    assert sum(len(action.orders) for action in world.actions(SendPrefetch)) == 3
    world.add_pod(world.pods[0].live)
    world.settle()
    assert uris(world) == [[NEXT.uri, LATER.uri]] * 4


def test_more_pods_begin_the_more_can_give_to_them() -> None:
    world = asking(NEXT, pods=9)
    world.settle()
    assert [len(action.orders) for action in world.actions(SendPrefetch)] == [1, 2, 4, 2]
    world.edit(prefetch=())
    world.log.clear()
    world.settle()
    assert [len(action.orders) for action in world.actions(SendPrefetch)] == [9], "nothing has to be fetched for it"


def test_who_is_slow_or_fails_does_not_keep_the_others_from_it() -> None:
    world = asking(NEXT, pods=4)
    while not any(uris(world)):
        world.run_pass()
    note(world, 0, 0, phase=PrefetchPhase.FETCHING)
    for _ in range(3):
        world.run_pass()
    assert [bool(rows) for rows in uris(world)] == [True, False, False, False]
    note(world, 0, 0, phase=PrefetchPhase.FAILED, error=ErrorBody(code="SourceUnreadable", message="503"))
    world.run_pass()
    assert [bool(rows) for rows in uris(world)] == [True, True, False, False]
    note(world, 1, 0, phase=PrefetchPhase.FETCHED)
    note(world, 0, 0, phase=PrefetchPhase.PENDING, error=None)
    world.run_pass()
    assert sum(bool(rows) for rows in uris(world)) == 3, "one fetches again, one can begin"
    note(world, 0, 0, phase=PrefetchPhase.FETCHED)
    world.settle()
    assert uris(world) == [[NEXT.uri]] * 4


def test_the_status_counts_who_has_it_and_says_why_one_has_not() -> None:
    world = asking(NEXT, LATER)
    world.settle()
    full = ErrorBody(code="InsufficientDisk", message="12 MiB are missing")
    note(world, 2, 0, phase=PrefetchPhase.FAILED, error=full)
    for pod in range(3):
        note(world, pod, 1, phase=PrefetchPhase.FETCHING, digest="sha256:" + "3" * 64)
    world.run_pass()
    first, second = world.status.prefetch
    assert (first.uri, first.digest, first.fetched_pods) == (NEXT.uri, NEXT.digest, 2)
    assert "12 MiB are missing" in first.message
    assert world.pods[2].name in first.message
    assert (second.digest, second.fetched_pods, second.message) == ("sha256:" + "3" * 64, 0, "")


def test_a_rollout_does_not_wait_for_it() -> None:
    world = asking(NEXT)
    world.bump("1.1")
    world.settle()
    assert set(world.serving()) == {"1.1"}
    assert uris(world) == [[NEXT.uri]] * 3


def test_what_is_not_named_any_more_is_taken_back() -> None:
    world = asking(NEXT)
    world.settle()
    world.edit(prefetch=())
    world.settle()
    assert uris(world) == [[]] * 3
    assert world.status.prefetch == ()


def test_a_sidecar_that_is_too_old_is_left_alone() -> None:
    world = asking(NEXT, protocol=2)
    world.settle()
    assert uris(world) == [[]] * 3
    assert not world.actions(SendPrefetch)


def test_a_pod_that_could_not_be_told_is_told_later() -> None:
    world = asking(NEXT)
    pod = world.pods[1]
    state = pod.state

    def out_of_reach():  # it answers who looks, and not who orders
        pod.reachable = True
        found = state()
        pod.reachable = False
        return found

    pod.state = out_of_reach  # type: ignore[method-assign]
    for _ in range(5):
        world.run_pass()
    assert [bool(rows) for rows in uris(world)] == [True, False, True]
    del pod.state
    pod.reachable = True
    world.settle()
    assert uris(world) == [[NEXT.uri]] * 3
