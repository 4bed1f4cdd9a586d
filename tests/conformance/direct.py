"""What external backends are given where no proxy stands before the engine: clients ask it themselves."""

import contextlib


class Nobody:
    """The requests that a proxy would carry: none."""

    def running(self) -> int:
        return 0

    def end(self) -> int:
        return 0

    def barred(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
