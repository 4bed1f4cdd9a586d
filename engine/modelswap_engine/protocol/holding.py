"""Swaps that wait beside the version that serves until they are told to go on (protocol version 2).

What is staged takes memory, so the wait is a lease: whoever asked for it renews it, and what was staged is dropped when
nobody does. Who may tell is the fence's to say, in `messages`.
"""

from typing import Annotated, Final

import msgspec

from modelswap_engine.protocol.wire import LONGEST_ID, Message

LONGEST_HOLD_SECONDS: Final = 3600

HoldSeconds = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_HOLD_SECONDS)]


class Hold(Message, frozen=True, kw_only=True):
    """Asks a swap to stage and then to wait, for ``seconds`` from now unless the lease is renewed.

    ``mark`` is the caller's own and comes back in the status: what it asked for beside the target, in a form that it
    can compare.
    """

    seconds: HoldSeconds
    mark: Annotated[str, msgspec.Meta(max_length=LONGEST_ID)] = ""


class HoldState(Message, frozen=True, kw_only=True):
    """A swap that goes no further than staged before it is told to.

    ``held`` says that it has come there and waits; everything that can be refused before the commit was looked at.
    ``seconds_left`` is the rest of the lease when the status was made; in ``GET /state`` it is that of the moment.
    """

    held: bool = False
    mark: str = ""
    seconds_left: float = 0.0
