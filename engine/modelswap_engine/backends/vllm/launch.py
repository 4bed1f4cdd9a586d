"""How vLLM is started behind a sidecar. Only the standard library: the Python of its image runs the launcher."""

from collections.abc import Sequence
from typing import Final

from modelswap_engine.backends.external.command import LEAVE_OUT, Rules, address
from modelswap_engine.backends.external.handshake import Boot

EXTENSION: Final = "modelswap_engine.backends.vllm.extension.ModelswapExtension"


def _added(boot: Boot) -> Sequence[str]:
    return [*address(boot), "--worker-extension-cls", EXTENSION]


RULES: Final = Rules(
    reserved={
        "--host": LEAVE_OUT,
        "--port": LEAVE_OUT,
        "--uds": LEAVE_OUT,
        "--worker-extension-cls": "name your own in the variable MODELSWAP_VLLM_EXTENSION",
    },
    added=_added,
    # Its control routes, and those by which adapters come and go, exist only with these. No key guards them (--api-key
    # is for /v1 alone), so the loopback interface has to.
    environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
)
