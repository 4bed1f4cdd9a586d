"""How SGLang is started behind a sidecar. Only the standard library: the Python of its image runs the launcher."""

from collections.abc import Sequence
from typing import Final

from modelswap_engine.backends.external.command import LEAVE_OUT, Rules, address
from modelswap_engine.backends.external.handshake import Boot


def _added(boot: Boot) -> Sequence[str]:
    # The version label is how a restart shows where nothing of ours runs inside the engine: it is back at what was
    # loaded at the start.
    # The key in one word with its option: one that begins with a dash would be taken for an option of its own.
    return [*address(boot), f"--admin-api-key={boot.admin_key}", "--weight-version", boot.digest]


RULES: Final = Rules(
    reserved=dict.fromkeys(["--host", "--port", "--admin-api-key", "--weight-version"], LEAVE_OUT),
    added=_added,
)
