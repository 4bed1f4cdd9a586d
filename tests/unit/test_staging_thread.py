"""The thread that stages: it is waited for, called off before and while it runs, and left behind when it hangs."""

import threading
from collections.abc import Iterator

import pytest

from modelswap_engine.protocol.errors import Cancelled, SourceUnreadable

pytestmark = pytest.mark.model


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def _staging():
    from modelswap_engine.backends.embedded.staging import Staging
    from modelswap_engine.weights.pace import Pace

    return Staging(new_pace=Pace, niceness=0)


def test_a_staging_that_was_called_off_before_its_turn_does_not_begin() -> None:
    staging, begun = _staging(), []
    staging.cancel("early")
    with pytest.raises(Cancelled):
        staging.run("early", begun.append)
    assert not begun
    assert staging.run("other", lambda pace: "staged") == "staged"


def test_a_late_cancel_is_forgotten_with_the_operation() -> None:
    staging = _staging()
    staging.cancel("op")
    staging.forget("op")
    assert staging.run("op", lambda pace: "staged") == "staged"


def test_a_source_that_hangs_is_left_behind_but_not_without_end(hang: threading.Event) -> None:
    from modelswap_engine.backends.embedded.staging import MOST_LEFT

    staging = _staging()

    def hanging(operation_id: str):
        def work(pace):
            staging.cancel(operation_id)
            hang.wait()
            return "too late"

        return work

    for number in range(MOST_LEFT):
        with pytest.raises(Cancelled, match="left behind"):
            staging.run(f"op{number}", hanging(f"op{number}"))
    with pytest.raises(SourceUnreadable, match="still hang"):
        staging.run("more", lambda pace: "staged")
    left = list(staging._left)
    hang.set()
    for thread in left:
        thread.join()
    assert staging.run("again", lambda pace: "staged") == "staged"


def test_a_thread_gives_way_by_so_much_and_nobody_else_does() -> None:
    import os

    from modelswap_engine.weights.pace import lower_priority

    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def work() -> None:
        for _ in range(2):
            lower_priority(4)
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [min(19, before + 4), min(19, before + 8)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
