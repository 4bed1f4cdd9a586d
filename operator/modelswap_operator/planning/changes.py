"""When versions may change: a freeze of the whole fleet, and change windows.

Pure; who keeps the policy is not known here.

A policy that cannot be read lets nothing change: whoever wrote it wanted to hold something back.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from modelswap_operator.api.times import stamp

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_WINDOW = re.compile(
    r"(?P<first>[A-Z][a-z]{2})(?:-(?P<last>[A-Z][a-z]{2}))? "
    r"(?P<opens>[0-2][0-9]:[0-5][0-9])-(?P<closes>[0-2][0-9]:[0-5][0-9]) (?P<zone>[A-Za-z0-9_+/-]+)"
)
WEEK = 8
"""Days to look ahead for the next opening: each day of the week, and the rest of today."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some hours on some days of the week; one that closes no later than it opens ends on the next day."""

    days: frozenset[int]
    opens: time
    closes: time
    zone: ZoneInfo

    def span(self, day: datetime) -> tuple[datetime, datetime] | None:
        """Return when it opens and closes, for the day it opens on; None when it does not open then."""
        if day.weekday() not in self.days:
            return None
        begins = day.replace(hour=self.opens.hour, minute=self.opens.minute, second=0, microsecond=0)
        ends = begins.replace(hour=self.closes.hour, minute=self.closes.minute)
        return begins, ends if ends > begins else ends + timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Why nothing may change now, and until when if that is known."""

    message: str
    until: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class ChangePolicy:
    """What the platform team allows.

    ``windows`` empty is any time; ``wrong`` is what cannot be read of it. ``ahead`` is how much later than ``now`` it
    really is: the operator's time does not follow when the system's clock is set.
    """

    frozen: bool = False
    reason: str = ""
    windows: tuple[Window, ...] = ()
    wrong: str = ""
    ahead: timedelta = timedelta()

    def hold(self, now: datetime) -> Hold | None:
        """Return why no version may change at this time; None when it may."""
        now += self.ahead
        if self.wrong:
            return Hold(message=f"changes are held back: {self.wrong}")
        if self.frozen:
            return Hold(message=f"changes are frozen: {self.reason}" if self.reason else "changes are frozen")
        if not self.windows or any(_open(window, now) for window in self.windows):
            return None
        until = min((moment for window in self.windows if (moment := _next(window, now))), default=None)
        told = f" until {stamp(until)}" if until is not None else ""
        return Hold(
            message=f"outside of the change windows{told}", until=until - self.ahead if until is not None else None
        )


def parse(data: Mapping[str, str]) -> ChangePolicy:
    """Read a policy: ``freeze`` (true or false), ``reason``, ``windows`` (one a line)."""
    freeze = data.get("freeze", "false").strip().lower()
    unknown = sorted(set(data) - {"freeze", "reason", "windows"})
    if unknown:
        return ChangePolicy(wrong=f"the policy has the unknown key {unknown[0]} (there are freeze, reason, windows)")
    if freeze not in ("true", "false"):
        return ChangePolicy(wrong=f"the policy's freeze is {freeze[:40]!r}, neither true nor false")
    windows = []
    for line in (line.strip() for line in data.get("windows", "").splitlines()):
        if line and not line.startswith("#"):
            window = _window(line)
            if window is None:
                return ChangePolicy(wrong=f"the policy's window {line[:80]!r} is not like 'Mon-Fri 09:00-16:00 UTC'")
            windows.append(window)
    return ChangePolicy(frozen=freeze == "true", reason=data.get("reason", "").strip()[:500], windows=tuple(windows))


def _window(line: str) -> Window | None:
    found = _WINDOW.fullmatch(" ".join(line.split()))
    if found is None:
        return None
    try:
        first, last = _DAYS.index(found["first"]), _DAYS.index(found["last"] or found["first"])
        days = frozenset((first + step) % 7 for step in range((last - first) % 7 + 1))
        opens, closes = time.fromisoformat(found["opens"]), time.fromisoformat(found["closes"])
        return Window(days=days, opens=opens, closes=closes, zone=ZoneInfo(found["zone"]))
    except (ValueError, OSError, ZoneInfoNotFoundError):  # a folder of zones, such as Europe, is an OSError
        return None


def _open(window: Window, now: datetime) -> bool:
    today = now.astimezone(window.zone)
    spans = (window.span(today - timedelta(days=back)) for back in (0, 1))
    return any(span is not None and span[0] <= now < span[1] for span in spans)


def _next(window: Window, now: datetime) -> datetime | None:
    today = now.astimezone(window.zone)
    spans = (window.span(today + timedelta(days=ahead)) for ahead in range(WEEK))
    begins = [span[0] for span in spans if span is not None and span[0] > now]
    return min(begins).astimezone(now.tzinfo) if begins else None
