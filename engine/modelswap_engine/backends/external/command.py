"""The command line and environment of an engine behind a sidecar: on this host only, from the sidecar's checkpoint.

Pure, standard library only. What cannot be is refused, never corrected in silence: an engine that listens elsewhere has
a second door.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from modelswap_engine.backends.external.handshake import Boot

LOOPBACK: Final = "127.0.0.1"
MODEL: Final = "{model}"
LEAVE_OUT: Final = "leave it out"
BOOT_ID_VARIABLE: Final = "MODELSWAP_BOOT_ID"
RUNTIME_VARIABLE: Final = "MODELSWAP_RUNTIME_DIR"


class BadCommandError(Exception):
    """A command that cannot be run behind a sidecar; the message says why and what to write instead."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How one engine is started.

    Attributes:
        reserved: options that the sidecar relies on, and that a user therefore cannot set, each with the next step.
        added: the options that are added for one start, those of the address included.
        environment: variables that the engine needs; a user's own value wins.
    """

    reserved: Mapping[str, str]
    added: Callable[[Boot], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)


def address(boot: Boot) -> list[str]:
    """Return the options by which both engines are told where to listen."""
    return ["--host", LOOPBACK, "--port", str(boot.port)]


def compose(given: Sequence[str], rules: Rules, *, model: str, boot: Boot) -> list[str]:
    """Return the command to run: the model's path put in, and what the sidecar relies on added.

    Raises:
        BadCommandError: the command names no model, or sets what is set here.
    """
    if not given:
        raise BadCommandError(f"no command; write it after --, with {MODEL} for the path of the model")
    if not any(MODEL in argument for argument in given[1:]):
        raise BadCommandError(f"the command names no {MODEL}; write it where the engine takes the path of its model")
    for argument in given:
        advice = rules.reserved.get(argument.partition("=")[0])
        if advice is not None:
            raise BadCommandError(f"{argument}: the launcher sets it, and the sidecar relies on it; {advice}")
    return [*(argument.replace(MODEL, model) for argument in given), *rules.added(boot)]


def environment(base: Mapping[str, str], rules: Rules, *, runtime_dir: str, boot: Boot) -> dict[str, str]:
    """Return the engine's environment; what a user has set stays."""
    return {**rules.environment, **base, BOOT_ID_VARIABLE: boot.boot_id, RUNTIME_VARIABLE: runtime_dir}
