"""Bounds of the plain route, in seconds, and what it is allowed."""

import msgspec


class PlainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What may be set.

    Attributes:
        start_seconds: how long an engine may take to come up.
        call_seconds: of a short call; update_seconds of loading tensors; hash_seconds of hashing all of them.
        canary_seconds: in which an engine must make a token after a pause.
        watch_seconds: between two looks at an engine that nobody talks to.
        poll_seconds: between two looks at something that is waited for.
        experimental: allow engines, devices and splits that those who wrote this could not run or cannot prove.
    """

    start_seconds: float = 900.0
    call_seconds: float = 60.0
    update_seconds: float = 600.0
    hash_seconds: float = 600.0
    canary_seconds: float = 30.0
    watch_seconds: float = 2.0
    poll_seconds: float = 0.25
    experimental: bool = False
