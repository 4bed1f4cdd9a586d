"""How background work rests, by what it has used, while there is somebody to give way to."""

import threading

import pytest

from modelswap_engine.protocol.errors import Cancelled
from modelswap_engine.weights.pace import Crew, Pace


class Rests:
    """Stands in for the event on which a pace rests."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.seconds.append(round(seconds, 6))
        return False

    def is_set(self) -> bool:
        return False


class World:
    """A thread's use of a processor, by hand."""

    def __init__(self, **options: object) -> None:
        self.used = 0.0
        self.busy = True
        self.pace = Pace(used=lambda: self.used, busy=lambda: self.busy, **options)  # type: ignore[arg-type]
        self.rests = Rests()
        self.pace._cancelled = self.rests  # type: ignore[assignment]

    def work(self, seconds: float) -> None:
        self.used += seconds
        self.pace.spend(1)


def test_it_rests_for_the_other_part_of_the_time() -> None:
    world = World(share=0.25)
    world.work(5.0)  # whatever the thread did before it worked for this
    world.work(0.010)
    world.work(0.020)
    assert world.rests.seconds == [0.03, 0.06]


def test_rests_that_are_too_short_are_collected() -> None:
    world = World(share=0.5)
    world.work(0)
    for _ in range(3):
        world.work(0.002)
    assert world.rests.seconds == [0.006]


def test_nobody_rests_where_nobody_decodes() -> None:
    world = World(share=0.1)
    world.work(0)
    world.busy = False
    world.work(1.0)
    world.busy = True
    world.work(0.001)
    assert world.rests.seconds == [0.009]


def test_a_whole_core_is_no_bound() -> None:
    world = World()
    world.work(0)
    world.work(3.0)
    assert world.rests.seconds == []


def test_each_thread_rests_for_itself() -> None:
    world = World(share=0.1)
    world.work(0)
    other = threading.Thread(target=world.work, args=(7.0,))
    other.start()
    other.join()
    assert world.rests.seconds == []


def test_a_crew_rests_with_the_whole_and_is_cancelled_with_it() -> None:
    world = World(share=0.1)
    crew = Crew(world.pace)
    crew.spend(1)
    world.used += 0.01
    crew.spend(1)
    assert world.rests.seconds == [0.09]
    pace = Pace()
    pace.cancel()
    with pytest.raises(Cancelled):
        Crew(pace).spend(0)
