"""What ``--worker-extension-cls`` names: one method on each of vLLM's workers, which carries text to our half in it.

vLLM takes one such class. A user's own one is named in ``MODELSWAP_VLLM_EXTENSION`` then, and is a base beside ours.
"""

import os
import pkgutil
import uuid
from typing import Any, Final

from modelswap_engine.backends.inprocess.agent import Agent
from modelswap_engine.backends.vllm.host import VllmHost

USERS: Final = "MODELSWAP_VLLM_EXTENSION"
_AGENT: Final = "_modelswap_agent"


class _Extension:
    """vLLM makes it a base of its worker class; it has no state of its own and no other public name."""

    def modelswap(self, text: str) -> str:
        """Carry a call out in this rank, between two steps; never raises."""
        here: dict[str, Any] = self.__dict__
        if _AGENT not in here:
            host = VllmHost(self)
            here[_AGENT] = Agent(host, boot_id=uuid.uuid4().hex, busy=host.busy)
        agent: Agent = here[_AGENT]
        return agent.answer(text)


def combined(name: str) -> type:
    """Return our class, with the one of this name beside it; "" for none.

    Raises:
        TypeError: that one has a method of our method's name.
    """
    if not name:
        return _Extension
    users = pkgutil.resolve_name(name)
    if hasattr(users, "modelswap"):
        raise TypeError(f"{name} ({USERS}) has an attribute modelswap, which is the name of ours; rename it")
    return type("ModelswapExtension", (_Extension, users), {})


ModelswapExtension = combined(os.environ.get(USERS, ""))
