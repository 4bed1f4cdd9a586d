"""SGLang's model and loading as :class:`~modelswap_engine.backends.inprocess.host.Host` asks for them.

The only file that reaches into SGLang. Written against 0.5.23; what is not there in another release shows in
``refusal`` or as an error before anything live is touched.
"""

import gc
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from modelswap_engine.backends.inprocess.experimental import allowed
from modelswap_engine.backends.inprocess.ways import Ways, ways
from modelswap_engine.backends.sglang.architectures import Setting, refusal
from modelswap_engine.protocol.errors import Internal

_SCHEDULES: Final = ("flush_cache", "record_weight_version_after_update")
_WRAPPED: Final = ".base_layer"
_FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class SglangHost:
    """One of SGLang's model runners.

    Args:
        runner: it.
        role: ``target``, or that of a draft model.
        updater: of the scheduler that it computes for, which alone can drop the cache; None where it was not found.
    """

    def __init__(self, runner: Any, *, role: str, updater: Any = None) -> None:
        self._runner = runner
        self._updater = updater if all(hasattr(updater, name) for name in _SCHEDULES) else None
        self._role = role
        self._place = place_of(runner, role)
        self._experiments = allowed(os.environ)

    @property
    def rank(self) -> int:
        """Its rank."""
        return int(self._place["rank"])

    @property
    def ranks(self) -> int:
        """How many hold the model together."""
        return int(self._place["size"])

    @property
    def software(self) -> str:
        """Name and version of SGLang."""
        from sglang.version import __version__

        return f"sglang {__version__}"

    @property
    def architecture(self) -> str:
        """The model's class."""
        return type(self._runner.model).__name__

    def refusal(self) -> str:
        """Say why not, from how the engine was started."""
        return refusal(
            Setting(
                architecture=self.architecture,
                device=torch.device(self._runner.device).type,
                quantization=str(self._runner.model_config.quantization or ""),
                role=self._role,
                pipeline_ranks=int(self._place["pp_size"]),
                data_ranks=int(self._place["dp_size"]),
                graphs=self._graphs(),
                experiments=self._experiments,
                packed=any(getattr(module, "use_intel_amx_backend", False) for module in self._runner.model.modules()),
            )
        )

    def ways(self) -> Ways:
        """Copy values where graphs hold addresses."""
        device = torch.device(self._runner.device)
        return ways(device=device, holds_addresses=self._graphs(), experiments=self._experiments)

    def _graphs(self) -> bool:
        on_cpu = torch.device(self._runner.device).type == "cpu"
        return not on_cpu and not getattr(self._runner.server_args, "disable_cuda_graph", False)

    def busy(self) -> bool:
        """Say whether requests are in the model's batch: each has a row in a table. Not told, they may be."""
        table = self._runner.req_to_token_pool
        free = getattr(table, "free_slots", None)
        return free is None or len(free) < int(table.size)

    def adapter_modules(self) -> tuple[str, ...]:
        """Ask SGLang's manager of adapters for the layers that it wraps; fused ones by their parts."""
        layers = getattr(getattr(self._runner, "lora_manager", None), "lora_modules", ())
        wrapped: list[str] = [name for layer in layers for name in layer]
        return tuple(
            f"{stem}.{part}" for stem, _, last in (name.rpartition(".") for name in wrapped) for part in _parts(last)
        )

    def live(self) -> Mapping[str, torch.nn.Module]:
        """Return the live modules; of one with adapters the layer that they are wrapped around, which comes later."""
        return {name.replace(_WRAPPED, ""): module for name, module in self._runner.model.named_modules()}

    def skeleton(self) -> torch.nn.Module:
        """Build the model's class on the meta device."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        config, how = self._runner.model_config, LoadConfig()
        with set_default_torch_dtype(config.dtype), torch.device("meta"):
            model: torch.nn.Module = _initialize_model(config, how, _get_quantization_config(config, how))
        return model.requires_grad_(False)

    def load(self, skeleton: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the model class's own loading."""
        loading: Any = skeleton
        loading.load_weights(iter(weights))

    def packed_attribute(self, module: torch.nn.Module) -> str:
        """Name none: where SGLang packs weights, it is refused."""
        del module
        return ""

    def pack(self, module: torch.nn.Module) -> object:
        """Refuse; nothing is packed."""
        raise Internal(f"{type(module).__name__} has no packed weight in SGLang")

    def unpack(self, packed: object, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Refuse; nothing is packed."""
        raise Internal(f"SGLang has no packed weight of shape {list(shape)} in {dtype}: {type(packed).__name__}")

    def wipe(self) -> None:
        """Nothing to do: SGLang reads no block beyond what a request has written into it."""

    def forget(self) -> bool | None:
        """Have the scheduler drop its cache as it does when it is asked to, but for a collection of garbage."""
        return None if self._updater is None else bool(self._updater.flush_cache(empty_cache=False))

    def called(self, digest: str) -> None:
        """Change the label from which the scheduler writes spans of versions."""
        if self._updater is not None:
            self._updater.record_weight_version_after_update(digest)

    def settled(self) -> None:
        """Take what is there out of garbage collection.

        On CPU SGLang collects at each flush, in the thread that computes: a walk over all objects of the process, of
        hundreds of milliseconds, twice while the gate is closed. SGLang does the same after its warm-up, unless that
        was left out; the modules of our skeleton have come since.
        """
        gc.collect()
        gc.freeze()


def _parts(module: str) -> tuple[str, ...]:
    return _FUSED.get(module, (module,))


def place_of(runner: Any, role: str) -> dict[str, Any]:
    """Say where in its world a runner is, as SGLang says it in its checksums."""
    found: dict[str, Any] = runner._weight_checker._parallelism_info(role=role).model_dump()
    return found
