"""Which starts of SGLang, and which models in it, may have their weights exchanged over its HTTP routes. Pure.

What is on no list is not refused: whether a model is understood shows in the names of its parameters. What is known to
go wrong is refused before anything is touched, with the reason.
"""

from pathlib import Path
from typing import Final

from modelswap_engine.backends.external.plain.adopt import Sight
from modelswap_engine.backends.external.plain.memory import Layout
from modelswap_engine.backends.sglang.answers import ModelInfo, ServerInfo

DENIED: Final = {
    "GptOssForCausalLM": "its update from disk is known to end in illegal memory accesses (sgl-project/sglang 11289)",
    "DeepseekV2ForCausalLM": "it computes with tensors derived from its weights, which its checksums do not show",
    "DeepseekV3ForCausalLM": "it computes with tensors derived from its weights, which its checksums do not show",
}
SUM_DIGITS: Final = 16
"""On a processor SGLang gives this many hex digits of the sha256."""

TESTED: Final = ("0.5.23",)


def refusal(server: ServerInfo, architecture: str, *, experimental: bool) -> str:
    """Say why weights cannot be exchanged in this start of the engine, "" when they can.

    Args:
        server: what it says of itself.
        architecture: of the model in it.
        experimental: allow what could not be run by those who wrote this.
    """
    for wrong, why in _known_bad(server, architecture):
        if wrong:
            return why
    untested = _untested(server)
    return "" if experimental or not untested else f"{untested}; it has not been run (allow it as experimental)"


def _known_bad(server: ServerInfo, architecture: str) -> tuple[tuple[bool, str], ...]:
    return (
        (architecture in DENIED, f"{architecture}: {DENIED.get(architecture, '')}"),
        (bool(server.quantization), f"weights are quantised ({server.quantization}): they are changed after loading"),
        (bool(server.speculative_algorithm), "a draft model has weights of its own, which a version does not hold"),
        (server.disaggregation_mode not in ("", "null"), "prefill and decode are apart: a pause reaches one of them"),
        (server.tokenizer_worker_num > 1, "with several tokenizer workers a pause reaches one of them"),
    )


def _untested(server: ServerInfo) -> str:
    if server.device != "cpu":
        return f"on {server.device} checksums cannot be worked out from files"
    if server.tp_size * server.pp_size * server.dp_size > 1:
        return "checksums of a split model cannot be worked out from files"
    if server.version not in TESTED:
        return f"SGLang {server.version} is not one of {', '.join(TESTED)}"
    return ""


def layout_of(server: ServerInfo) -> Layout:
    """Return the layout of a start of the engine."""
    return Layout(
        version=server.version,
        device=server.device,
        dtype=server.dtype,
        quantization=server.quantization or "",
        tp_size=server.tp_size,
        pp_size=server.pp_size,
        dp_size=server.dp_size,
    )


def sight_of(server: ServerInfo, model: ModelInfo) -> Sight:
    """Say what the checksums of a start are of."""
    whole = server.tp_size * server.pp_size * server.dp_size == 1
    return Sight(
        exact=whole and server.device == "cpu",
        dtype=server.dtype,
        digits=SUM_DIGITS,
        loaded_from=Path(model.model_path),
    )
