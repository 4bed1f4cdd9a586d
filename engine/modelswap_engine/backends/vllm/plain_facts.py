"""Which starts of vLLM may have their weights exchanged over its HTTP routes, from what they say themselves. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from modelswap_engine.backends.external.plain.memory import Layout
from modelswap_engine.backends.vllm.architectures import REFUSED

TRIED: Final = frozenset({"LlamaForCausalLM"})
"""Models of which a part was loaded over live ones, and held against a start on the whole."""

VERSIONS: Final = ("0.32.",)


class Started:
    """One start.

    Args:
        config: what it was started with.
        version: of the engine.
    """

    def __init__(self, config: Mapping[str, Any], *, version: str) -> None:
        self._config = config
        self._version = version

    @property
    def dtype(self) -> str:
        """The dtype it computes in, as ``float32``."""
        return str(self._of("model_config", "dtype", "")).removeprefix("torch.")

    @property
    def whole(self) -> bool:
        """True where one rank holds the whole model, in the memory of a processor."""
        return self._device == "cpu" and self._number("parallel_config", "world_size") == 1

    @property
    def layout(self) -> Layout:
        """All that its checksums depend on besides the bytes."""
        return Layout(
            version=self._version,
            device=self._device,
            dtype=self.dtype,
            quantization=str(self._of("model_config", "quantization", None) or ""),
            tp_size=self._number("parallel_config", "tensor_parallel_size"),
            pp_size=self._number("parallel_config", "pipeline_parallel_size"),
            dp_size=self._number("parallel_config", "data_parallel_size"),
        )

    @property
    def loaded_from(self) -> str:
        """The path of the checkpoint that it was started on."""
        return str(self._of("model_config", "model", ""))

    @property
    def _device(self) -> str:
        return str(self._of("device_config", "device", "")).partition(":")[0]

    def refusal(self, architecture: str) -> str:
        """Say why weights cannot be exchanged, "" when they can."""
        found = (
            (not self._config, "its control routes are not there; start vLLM with VLLM_SERVER_DEV_MODE=1"),
            (not self._version.startswith(VERSIONS), f"release {self._version} was not tried"),
            (architecture not in TRIED, f"{architecture}: {_why(architecture)}"),
            (self._device != "cpu", f"device {self._device}: it was not tried there"),
            (bool(self._of("model_config", "quantization", None)), "quantized weights are loaded into other forms"),
            (not self._of("model_config", "enforce_eager", False), "compiled code was not tried; use --enforce-eager"),
            (self._number("parallel_config", "pipeline_parallel_size") > 1, "pipeline stages were not tried"),
            (
                self._number("parallel_config", "data_parallel_size") > 1,
                "a call does not reach all data parallel engines",
            ),
            (self._of("speculative_config", "model", None) is not None, "a draft model has weights of its own"),
            (bool(self._of("lora_config", "max_loras", 0)), "adapters: their layers wrap those that are loaded"),
        )
        return next((why for wrong, why in found if wrong), "")

    def _of(self, part: str, name: str, default: object) -> Any:
        inside = self._config.get(part)
        return inside.get(name, default) if isinstance(inside, Mapping) else default

    def _number(self, part: str, name: str) -> int:
        found = self._of(part, name, 1)
        return found if isinstance(found, int) else 1


def _why(architecture: str) -> str:
    return next((why for part, why in REFUSED if part in architecture), "it was not tried over HTTP")
