"""What nobody has tried on the hardware that it is for: refused, unless whoever starts the engine asks for it by name.

``MODELSWAP_EXPERIMENTAL`` in the environment of the engine's container lists names, with commas between them:

- ``copy``: new values are written into the memory that is there, instead of moving pointers to other memory;
- ``graphs``: the same, in an engine that runs captured graphs or compiled code, which hold addresses;
- ``devices``: weights lie on an accelerator.

Pure, and without torch.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

VARIABLE: Final = "MODELSWAP_EXPERIMENTAL"


class Experiment(StrEnum):
    """One of these ways."""

    COPY = "copy"
    GRAPHS = "graphs"
    DEVICES = "devices"


def allowed(environ: Mapping[str, str]) -> frozenset[Experiment]:
    """Return what was asked for; names that mean nothing here are passed over."""
    known = {experiment.value: experiment for experiment in Experiment}
    names = [name.strip().lower() for name in environ.get(VARIABLE, "").split(",")]
    return frozenset(known[name] for name in names if name in known)


def untried(what: str, experiment: Experiment) -> str:
    """Return a refusal that names the way round it."""
    return f"{what}; nobody has tried it ({VARIABLE}={experiment} allows it all the same)"
