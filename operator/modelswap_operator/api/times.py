"""Times as the API writes them: RFC 3339 in UTC, to the second."""

from datetime import UTC, datetime

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def stamp(moment: datetime) -> str:
    """Return a moment as the API writes it."""
    return moment.strftime(_FORM)


def parse(text: str) -> datetime | None:
    """Return the moment of a stamp; None when it is none."""
    try:
        return datetime.strptime(text, _FORM).replace(tzinfo=UTC)
    except ValueError:
        return None
