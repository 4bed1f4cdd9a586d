"""The wish that the engine's container be restarted: a sidecar cannot do it, it can only say so.

Whoever may restart it (in a pod the kubelet, by the engine's liveness probe) asks :attr:`RestartWish.reason`. It knows
nothing of who that is, nor of whether it is allowed.
"""

import logging
from typing import Final

from modelswap_engine.protocol.errors import WorkerLost

log: Final = logging.getLogger("modelswap.external")


class RestartWish:
    """Wanted for one start of the engine, and over when another one is seen.

    Attributes:
        reason: why a restart is wanted, "" while it is not.
        boot_id: the start that must end; "" where it was not known.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.boot_id = ""

    @property
    def wanted(self) -> bool:
        """True while a restart is wanted."""
        return bool(self.reason)

    def want(self, reason: str, *, boot_id: str) -> None:
        """Wish that this start of the engine ends; the first reason stays."""
        if not self.wanted:
            self.reason, self.boot_id = reason, boot_id
            log.error("a restart of the engine is wanted: %s", reason)

    def distrust(self, why: str, *, boot_id: str) -> WorkerLost:
        """Wish it because nobody knows what is live in this start; return what to tell whoever asked for something."""
        self.want(why, boot_id=boot_id)
        return WorkerLost(
            f"the engine cannot be trusted any more: {why}", advice="it is restarted where that is allowed"
        )

    def seen(self, boot_id: str) -> None:
        """The engine answers under this boot id; another start than the unwanted one fulfils the wish."""
        if self.wanted and boot_id != self.boot_id:
            log.info("the engine was restarted, as was wanted: %s", self.reason)
            self.reason = self.boot_id = ""
