"""How vLLM is started behind a sidecar. Only the standard library: the Python of its image runs the launcher."""

from typing import Final

from modelswap_engine.backends.external.command import Rules, address

RULES: Final = Rules(
    reserved=frozenset({"--host", "--port", "--uds"}),
    added=address,
    # Its control routes, and those by which adapters come and go, exist only with these. No key guards them (--api-key
    # is for /v1 alone), so the loopback interface has to.
    environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
)
