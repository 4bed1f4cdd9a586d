"""The wish for a restart: it is about one start of the engine, and another start ends it."""

from modelswap_engine.backends.external.restart import RestartWish


def test_it_lasts_until_another_start_is_seen() -> None:
    wish = RestartWish()
    wish.want("rank 1 did not answer to commit", boot_id="one")
    wish.want("a later reason", boot_id="one")

    wish.seen("one")
    assert wish.reason == "rank 1 did not answer to commit"

    wish.seen("two")
    assert not wish.wanted


def test_a_start_that_nobody_minds_is_nothing() -> None:
    wish = RestartWish()
    wish.seen("one")

    assert not wish.wanted
