"""Reading ``adapter_config.json`` as hostile input: what an adapter does, and whether this engine can do it.

Only plain low-rank adapters are applied. A key that would change the answer in a way that is not done here is refused
by name, and so is an unknown key that says anything: it may be such a one of a later peft. Patterns are compared as
names, never run as regular expressions: one written with malice stops a process.

Pure: bytes go in, values come out.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from modelswap_engine.checkpoint import strict_json
from modelswap_engine.checkpoint.rules import refuse, shown
from modelswap_engine.protocol.errors import UnsupportedAdapter
from modelswap_engine.sources.adapter import CONFIG_FILE, MAX_CONFIG_BYTES

MAX_RANK: Final = 4096
MAX_PATTERNS: Final = 8192
_PLAIN: Final = re.compile(r"\^?[A-Za-z0-9_.]{1,512}")

_IGNORED: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "peft_version",
        "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
"""Keys that change how an adapter is trained or found, not what it answers."""

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "alora_invocation_tokens": (),
        "arrow_config": (),
        "bias": ("none",),
        "corda_config": (),
        "ensure_weight_tying": (False,),
        "fan_in_fan_out": (False, True),  # how the base stores its weight, which the base itself says
        "init_lora_weights": (True, False, "gaussian", "eva", "mica", "orthogonal"),
        "kasa_config": (),
        "layer_replication": (),
        "loftq_config": ({},),
        "lora_ga_config": (),
        "lora_bias": (False,),
        "megatron_config": (),
        "megatron_core": ("megatron.core",),
        "modules_to_save": ([],),
        "monteclora_config": (),
        "peft_type": ("LORA",),
        "qalora_group_size": (16,),
        "target_parameters": ([],),
        "trainable_token_indices": ([], {}),
        "use_bdlora": (),
        "use_dora": (False,),
        "use_qalora": (False,),
        "velora_config": (),
    }
)
"""Keys that this engine does not act on, with the values that ask for nothing (null always does)."""

_READ: Final = frozenset(
    {
        "alpha_pattern", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_alpha", "r",
        "rank_pattern", "target_modules", "use_rslora",
    }
)  # fmt: skip

_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "alora_invocation_tokens": "adapters that begin at a token of the prompt",
        "bias": "trained biases",
        "init_lora_weights": "adapters that belong to a changed copy of their base",
        "layer_replication": "replicated layers",
        "lora_bias": "a bias in the adapter",
        "modules_to_save": "whole modules saved with the adapter",
        "peft_type": "other methods than LoRA",
        "target_parameters": "adapters on parameters (fused experts)",
        "trainable_token_indices": "trained embeddings",
        "use_dora": "DoRA",
    }
)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What an adapter says about itself.

    Attributes:
        rank: of modules that ``rank_pattern`` does not name.
        alpha: the same for ``alpha_pattern``; the update is scaled by alpha / rank, with ``rslora`` by alpha / √rank.
        targets: names of the modules; None where only an expression says which.
        layers: layer numbers to which the targets are restricted.
        layers_pattern: names of the lists that those numbers count in.
        exclude: names of modules that are left out.
    """

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    targets: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the rank of a module; the first pattern that names it decides."""
        return next((rank for name, rank in self.rank_pattern if _names(name, module)), self.rank)

    def alpha_of(self, module: str) -> float:
        """Return what a module's update is scaled by, before its rank comes in."""
        return next((alpha for name, alpha in self.alpha_pattern if _names(name, module)), self.alpha)

    def scaling_of(self, module: str) -> float:
        """Return the factor of a module's update."""
        alpha, rank = self.alpha_of(module), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def canonical(self) -> list[object]:
        """Return what of it changes answers, for the digest."""
        return [self.rank, self.alpha, self.rslora, list(self.rank_pattern), list(self.alpha_pattern)]


def parse_config(data: bytes) -> AdapterConfig:
    """Read the file.

    Raises:
        InvalidCheckpoint: not what an adapter's config can be.
        UnsupportedAdapter: it asks for something that is not done here; the message names the key.
    """
    if len(data) > MAX_CONFIG_BYTES:
        refuse(f"larger than {MAX_CONFIG_BYTES} bytes", file=CONFIG_FILE)
    fields = strict_json.loads(data, file=CONFIG_FILE)
    if not isinstance(fields, dict):
        refuse("not a JSON object", file=CONFIG_FILE)
    _refuse_unsupported(fields)
    return AdapterConfig(
        rank=_rank(fields.get("r", 8), "r"),
        alpha=_alpha(fields.get("lora_alpha", 8), "lora_alpha"),
        rslora=_flag(fields.get("use_rslora"), "use_rslora"),
        rank_pattern=tuple((n, _rank(v, "rank_pattern")) for n, v in _patterns(fields.get("rank_pattern"), "rank")),
        alpha_pattern=tuple(
            (n, _alpha(v, "alpha_pattern")) for n, v in _patterns(fields.get("alpha_pattern"), "alpha")
        ),
        targets=_targets(fields.get("target_modules")),
        layers=_layers(fields),
        layers_pattern=_some_names(fields.get("layers_pattern"), "layers_pattern"),
        exclude=_some_names(fields.get("exclude_modules"), "exclude_modules"),
    )


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        _unsupported("peft_type", fields.get("peft_type"))
    for key, value in fields.items():
        if key in _READ or key in _IGNORED or value is None:
            continue
        neutral = _NEUTRAL.get(key, (False, 0, "", [], {}))
        if not any(type(value) is type(item) and value == item for item in neutral):
            _unsupported(key, value)


def _unsupported(key: str, value: object) -> None:
    reason = _REASONS.get(key, "this setting")
    raise UnsupportedAdapter(
        f"{CONFIG_FILE}: {shown(key)} is {shown(repr(value))}: {reason} cannot be applied here",
        advice="merge the adapter into its base and deploy that as a version, or train a plain LoRA",
        details={"key": shown(key)},
    )


def _rank(value: object, key: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        refuse(f"{key}: {shown(repr(value))} is not a rank of 1 to {MAX_RANK}", file=CONFIG_FILE)
    return value


def _alpha(value: object, key: str) -> float:
    if type(value) not in (int, float) or not isinstance(value, int | float) or not abs(value) <= 1e6:
        refuse(f"{key}: {shown(repr(value))} is not a number up to a million", file=CONFIG_FILE)
    return float(value)


def _flag(value: object, key: str) -> bool:
    if value is not None and not isinstance(value, bool):
        refuse(f"{key}: {shown(repr(value))} is neither true nor false", file=CONFIG_FILE)
    return bool(value)


def _patterns(value: object, key: str) -> list[tuple[str, object]]:
    if value is None:
        return []
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        refuse(f"{key}_pattern is not an object of at most {MAX_PATTERNS} names", file=CONFIG_FILE)
    for name in value:
        _check_plain(name, f"{key}_pattern")
    return list(value.items())


def _check_plain(name: object, key: str) -> str:
    if not isinstance(name, str):
        refuse(f"{key}: {shown(repr(name))} is not a name", file=CONFIG_FILE)
    if not _PLAIN.fullmatch(name):
        raise UnsupportedAdapter(
            f"{CONFIG_FILE}: {key}: {shown(name)!r} is an expression; only names of modules are compared",
            advice="write the modules' names out",
            details={"key": key},
        )
    return name


def _targets(value: object) -> tuple[str, ...] | None:
    """Return the names; a text is an expression (or "all-linear"), and then the tensors say which modules are meant."""
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PATTERNS:
        refuse(f"target_modules is not a list of 1 to {MAX_PATTERNS} names", file=CONFIG_FILE)
    return tuple(_check_plain(name, "target_modules") for name in value)


def _some_names(value: object, key: str) -> tuple[str, ...]:
    """Return one name or a list of names."""
    names = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list) or len(names) > MAX_PATTERNS:
        refuse(f"{key} is not a list of at most {MAX_PATTERNS} names", file=CONFIG_FILE)
    return tuple(_check_plain(name, key) for name in names)


def _layers(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = fields.get("layers_to_transform")
    if value is None:
        return None
    numbers = [value] if type(value) is int else value
    if not isinstance(numbers, list) or not all(type(item) is int and 0 <= item < 1 << 20 for item in numbers):
        refuse("layers_to_transform is not a list of layer numbers", file=CONFIG_FILE)
    return tuple(numbers) or None


def _names(pattern: str, module: str) -> bool:
    """Say whether a pattern names a module: the whole path after ``^``, else its end."""
    if pattern.startswith("^"):
        return module == pattern[1:]
    return module == pattern or module.endswith(f".{pattern}")
