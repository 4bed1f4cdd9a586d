"""vLLM's model, loading and packing as :class:`~modelswap_engine.backends.inprocess.host.Host` asks for them.

The only file that reaches into vLLM. Written against 0.32; what is not there in another release shows in ``refusal`` or
as an error before anything live is touched.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch

from modelswap_engine.backends.inprocess.experimental import allowed
from modelswap_engine.backends.inprocess.state import read_linear
from modelswap_engine.backends.inprocess.ways import Ways, ways
from modelswap_engine.backends.vllm.architectures import Setting, refusal
from modelswap_engine.protocol.errors import Internal

_PACKED: Final = "cpu_linear"
_WRAPPED: Final = ".base_layer"


class VllmHost:
    """One of vLLM's workers.

    Args:
        worker: it.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._config = worker.vllm_config
        self._experiments = allowed(os.environ)

    @property
    def rank(self) -> int:
        """Its rank."""
        return int(self._worker.rank)

    @property
    def ranks(self) -> int:
        """How many hold the model together."""
        return int(self._config.parallel_config.world_size)

    @property
    def software(self) -> str:
        """Name and version of vLLM."""
        import vllm

        return f"vllm {vllm.__version__}"

    @property
    def architecture(self) -> str:
        """The model's class."""
        return type(self._model()).__name__

    def refusal(self) -> str:
        """Say why not, from how the engine was started."""
        config = self._config
        return refusal(
            Setting(
                architecture=self.architecture,
                device=str(self._worker.device.type),
                quantization=str(config.model_config.quantization or ""),
                compiled=not config.model_config.enforce_eager,
                pipeline_ranks=int(config.parallel_config.pipeline_parallel_size),
                data_ranks=int(config.parallel_config.data_parallel_size),
                speculative=config.speculative_config is not None,
                experiments=self._experiments,
            )
        )

    def ways(self) -> Ways:
        """Copy values where graphs or compiled code hold addresses."""
        eager = bool(self._config.model_config.enforce_eager)
        device = torch.device(self._worker.device)
        return ways(device=device, holds_addresses=not eager, experiments=self._experiments)

    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._worker.get_model()
        return model

    def busy(self) -> bool:
        """Say whether requests are in the model's batch; where vLLM does not tell, they may be."""
        runner = self._worker.model_runner
        for owner, name in ((runner, "requests"), (getattr(runner, "req_states", None), "req_id_to_index")):
            requests = getattr(owner, name, None)
            if requests is not None:
                return bool(requests)
        return True

    def adapter_modules(self) -> tuple[str, ...]:
        """Ask vLLM's manager of adapters, of linear layers only: it also wraps embeddings and the head."""
        from vllm.model_executor.layers.linear import LinearBase

        manager = getattr(getattr(self._worker.model_runner, "lora_manager", None), "_adapter_manager", None)
        wrapped: Mapping[str, Any] = getattr(manager, "modules", {})
        fused: Mapping[str, list[str]] = getattr(manager, "packed_modules", {})
        linear = [name for name, layer in wrapped.items() if isinstance(getattr(layer, "base_layer", None), LinearBase)]
        return tuple(part for name in linear for part in fused.get(name, [name]))

    def live(self) -> Mapping[str, torch.nn.Module]:
        """Return the live modules; of one with adapters the layer that they are wrapped around, which comes later."""
        return {name.replace(_WRAPPED, ""): module for name, module in self._model().named_modules()}

    def skeleton(self) -> torch.nn.Module:
        """Build the model's class on the meta device; its attention layers are entered in a register of their own."""
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self._config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            model: torch.nn.Module = initialize_model(vllm_config=config)
        return model.requires_grad_(False)

    def load(self, skeleton: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the model class's own loading."""
        loading: Any = skeleton
        loading.load_weights(iter(weights))

    def packed_attribute(self, module: torch.nn.Module) -> str:
        """Name the function that a linear layer on CPU calls in place of using its weight."""
        return _PACKED if _holds_weight(module.__dict__.get(_PACKED)) else ""

    def pack(self, module: torch.nn.Module) -> object:
        """Have vLLM pack the layer's weight."""
        layer: Any = module
        layer.quant_method.process_weights_after_loading(layer)
        packed = module.__dict__.pop(_PACKED, None)
        if not _holds_weight(packed):
            raise Internal(
                f"vLLM has packed the live {type(module).__name__}, and did not pack another one like it",
                advice="use the engine's own routes; report the version of vLLM",
            )
        return packed

    def unpack(self, packed: object, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Work out the weight that a packed layer applies."""
        linear: Any = packed
        unused = torch.empty(0, dtype=dtype)
        with torch.no_grad():
            return read_linear(lambda rows: linear(rows, unused, None), shape, dtype)

    def wipe(self) -> None:
        """Look at the first number of every block, which is none where the block was filled by such a version."""
        for cache in _tensors(getattr(self._worker.model_runner, "kv_caches", ())):
            first = cache
            while first.dim() > 2:
                first = first.select(-1, 0)
            if cache.is_floating_point() and not bool(torch.isfinite(first).all()):
                cache.zero_()

    def forget(self) -> bool | None:
        """The cache of prefixes is kept by the process that schedules, of which a worker knows nothing."""
        return None

    def called(self, digest: str) -> None:
        """Nothing to do: a worker labels no answers."""

    def settled(self) -> None:
        """Nothing to do: vLLM takes itself out of garbage collection when it has started."""


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        elif isinstance(cache, list | tuple):
            yield from _tensors(cache)


def _holds_weight(function: object) -> bool:
    """Say whether a layer's function has the weight within it; others are given it with each call."""
    return bool(getattr(function, "__closure__", None))
