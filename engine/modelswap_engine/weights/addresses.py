"""Whether somebody other than the module's own parameters remembers where its values lie.

Compiled code and captured graphs may read memory by the address that it had when they were made. Then a parameter that
is pointed elsewhere changes nothing for them, and new values must be written into the old memory.
"""

import torch


def compiled(module: torch.nn.Module) -> bool:
    """Say whether any part of a module is run through ``torch.compile``."""
    return any(
        isinstance(part, torch._dynamo.OptimizedModule)
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        for part in module.modules()
    )
