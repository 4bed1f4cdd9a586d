"""Delays between attempts: exponential with full jitter. The random number is given, never drawn here."""

from datetime import timedelta

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
SLOW_SECONDS = 300.0
"""After the progress deadline a rollout is still tried, at about this pace."""


def delay(attempts: int, random: float, *, longest: float = LONGEST_SECONDS) -> timedelta:
    """Return how long to wait after ``attempts`` (from 1) failures in a row; ``random`` is uniform in [0, 1).

    Full jitter spreads the retries of many pods; a tenth of the bound is kept as a floor so that a lucky draw
    does not hammer a pod.
    """
    bound = min(longest, FIRST_SECONDS * 2 ** min(attempts - 1, 16))
    return timedelta(seconds=max(bound / 10, bound * random))
