"""What peft makes of an adapter's config: it wrote the format, so it has to agree on what is applied where.

Only values that were read and checked as hostile input reach it (``modelswap_engine.lora.config``): names, numbers and
flags. peft runs names as regular expressions; there is nothing in them here that one could do harm with.
"""

import math
from collections.abc import Iterable
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from modelswap_engine.backends.adapters import LoadAdapter
from modelswap_engine.lora.config import AdapterConfig, parse_config
from modelswap_engine.protocol.errors import IncompatibleAdapter, InvalidCheckpoint


def check_with_peft(order: LoadAdapter, modules: Iterable[str]) -> None:
    """Hold an order against what peft reads in the adapter's own config.

    Args:
        order: what would be applied.
        modules: names of all modules that adapters may change.

    Raises:
        InvalidCheckpoint: peft cannot read the config, or applies other ranks or scalings.
        IncompatibleAdapter: the config names a module that the adapter has nothing for, or the other way round.
    """
    ours = parse_config(order.config.encode())
    config = _peft_config(ours)
    for item in order.modules:
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), item.target), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), item.target), config.lora_alpha)
        scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
        if rank != item.rank or scaling != item.scaling:
            raise InvalidCheckpoint(
                f"adapter {order.adapter_id}: module {item.target}: peft reads rank {rank} and scaling {scaling}, "
                f"the order says {item.rank} and {item.scaling}",
                advice="save the adapter with a current peft",
                details={"module": item.target},
            )
    if ours.targets is not None:
        _check_modules(order, config, modules)


def _peft_config(ours: AdapterConfig) -> Any:
    fields: dict[str, Any] = {
        "r": ours.rank,
        "lora_alpha": ours.alpha,
        "use_rslora": ours.rslora,
        "rank_pattern": dict(ours.rank_pattern),
        "alpha_pattern": dict(ours.alpha_pattern),
        "target_modules": list(ours.targets) if ours.targets is not None else None,
        "exclude_modules": list(ours.exclude) or None,
        "layers_to_transform": list(ours.layers) if ours.layers is not None else None,
        "layers_pattern": list(ours.layers_pattern) or None,
        "inference_mode": True,
    }
    try:
        return LoraConfig(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidCheckpoint(f"adapter_config.json: peft refuses it: {error}", advice="save it again") from error


def _check_modules(order: LoadAdapter, config: Any, modules: Iterable[str]) -> None:
    here = {item.target for item in order.modules}
    for name in sorted(modules):
        wanted = bool(check_target_module_exists(config, name))
        if wanted != (name in here):
            what = "is a target of the config, and has no tensors" if wanted else "has tensors, and is no target"
            raise IncompatibleAdapter(
                f"adapter {order.adapter_id}: module {name} {what}",
                advice="the adapter was saved in part, or edited; save it again",
                details={"module": name},
            )
