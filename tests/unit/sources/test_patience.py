"""When something is asked again."""

import pytest

from modelswap_engine.sources.web.patience import Patience, retry_after

NOW = 1_000_000_000.0  # 2001-09-09T01:46:40Z


def test_pauses_double_up_to_the_longest_and_end() -> None:
    patience = Patience(attempts=5, first=1, longest=3)
    assert [patience.pause(failures, after=0, chance=1.0) for failures in range(1, 6)] == [1, 2, 3, 3, None]
    assert patience.pause(3, after=0, chance=0.0) == 1.5


def test_a_server_is_given_the_time_that_it_asks_for_within_bounds() -> None:
    patience = Patience(attempts=5, first=1, longest=3)
    assert patience.pause(1, after=2.5, chance=1.0) == 2.5
    assert patience.pause(2, after=0.1, chance=1.0) == 2
    assert patience.pause(1, after=3.1, chance=1.0) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    {
        "120": 120.0,
        "0": 0.0,
        "Sun, 09 Sep 2001 01:46:50 GMT": 10.0,
        "Sun, 09 Sep 2001 01:46:30 GMT": 0.0,
        "": 0.0,
        "soon": 0.0,
        "-5": 0.0,
        "٣": 0.0,
        "9" * 400: 999_999_999.0,
    }.items(),
)
def test_what_retry_after_says(header: str, seconds: float) -> None:
    assert retry_after(header, now=NOW) == seconds
