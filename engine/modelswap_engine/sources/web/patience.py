"""When something is asked again, and when it is given up. Pure."""

from email.utils import parsedate_to_datetime

import msgspec

from modelswap_engine.protocol.errors import ModelswapError


class Passing(Exception):
    """Something that may be otherwise in a moment.

    Args:
        error: what is told when it is not.
        after: seconds that the server asks to wait; 0: it says nothing.
    """

    def __init__(self, error: ModelswapError, *, after: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.after = error, after


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How often something is asked for since it last got on, and how long the pauses are (seconds, doubling)."""

    attempts: int = 4
    first: float = 0.5
    longest: float = 20.0

    def pause(self, failures: int, *, after: float, chance: float) -> float | None:
        """Return how long to wait after so many failures; None: no more.

        Args:
            failures: since it last got on.
            after: what the server asks for; a server that asks for longer than the longest pause is given up.
            chance: in [0, 1), so that pods do not come again at the same moment.
        """
        if failures >= self.attempts or after > self.longest:
            return None
        return max(after, min(self.longest, self.first * 2.0 ** (failures - 1)) * (0.5 + chance / 2))


def retry_after(value: str, *, now: float) -> float:
    """Return the seconds that a Retry-After header asks for; 0 where it says nothing that can be read.

    Args:
        value: the header: seconds or a date.
        now: seconds since the epoch.
    """
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0
