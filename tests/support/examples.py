"""How many examples Hypothesis tries of what takes long: few in `make test`, many in `make test-full`."""

import os


def examples(number: int) -> int:
    """Return `number`, and four times as many where time does not matter."""
    return 4 * number if os.environ.get("FULL") else number
