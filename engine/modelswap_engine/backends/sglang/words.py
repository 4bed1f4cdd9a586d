"""What the sidecar and our half in SGLang's process agree on to find each other in SGLang's own messages."""

from typing import Final

GROUP: Final = "sglang.srt.plugins"
PLUGIN: Final = ("modelswap", "modelswap_engine.backends.sglang.plugin:register")
"""The entry point by which SGLang finds our half, and the group in which it looks for such."""

ACTION: Final = "modelswap:"
"""How an action of the weights checker begins that is a call to our half; the rest of it is the call."""

ANSWER: Final = "modelswap"
"""Under which name the answer lies among the checksums of a rank."""
