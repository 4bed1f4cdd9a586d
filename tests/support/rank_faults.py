"""Breaks our half in one of vLLM's ranks, at one of its calls, when a test says so.

It comes in as a user's own worker extension does (``MODELSWAP_VLLM_EXTENSION``), so nothing in the product knows of it.
``MODELSWAP_FAULT=file:PATH`` names a file with faults, as :mod:`modelswap_engine.backends.embedded.faults` has them:
``commit@1:raise`` fails the commit on rank 1.
"""

import os

from modelswap_engine.backends.embedded.faults import VARIABLE, Faults
from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.inprocess.agent import Agent

NAME = "tests.support.rank_faults:Extension"
_act = Agent._act
_faults: dict[int, Faults] = {}


def _faulty(agent: Agent, call: wire.Call) -> wire.Answer:
    rank = agent._host.rank
    faults = _faults.setdefault(rank, Faults(os.environ.get(VARIABLE, ""), rank=rank))
    faults.hit(type(call).__name__.removesuffix("Call").removesuffix("Retained").lower())  # both stage
    return _act(agent, call)


Agent._act = _faulty  # type: ignore[method-assign]


class Extension:
    """Has nothing of its own: to be loaded is all it does."""
