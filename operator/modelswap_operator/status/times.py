"""Times as the API writes them: UTC, to the second."""

from datetime import datetime

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def stamp(moment: datetime) -> str:
    """Return RFC 3339."""
    return moment.strftime(_FORM)
