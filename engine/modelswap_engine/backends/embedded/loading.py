"""Builds a transformers model for a checkpoint, and applies transformers' own loading rules to some of its tensors.

Never runs code of a checkpoint (``trust_remote_code`` is off, the attention implementation is ours, nothing is looked
up on a hub) and never lets transformers read a weights file: tensors come in through the weights core, proven.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.utils import is_dtensor

from modelswap_engine.backends.embedded.splitting import OnDemand
from modelswap_engine.backends.embedded.team import Team
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.protocol.errors import IncompatibleModel, InvalidCheckpoint, ModelswapError
from modelswap_engine.weights.live import LiveTable
from modelswap_engine.weights.mapping import Part, fuse
from modelswap_engine.weights.pace import Pace
from modelswap_engine.weights.place import HOST, Place, full
from modelswap_engine.weights.reader import dtype_of, read_all
from modelswap_engine.weights.updater import meta_tensors

_ATTENTION: Final = "sdpa"


class TransformersLoader:
    """The loading rules of one model; see :class:`~modelswap_engine.weights.mapping.Loader`."""

    def __init__(self, model: PreTrainedModel) -> None:
        rules = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        state = model.state_dict()
        self._state = dict.fromkeys(state, True)
        # How split parameters are cut; without the parameters, whose memory would be held for ever.
        self._cuts = {name: DtensorShardOperation(value) for name, value in state.items() if is_dtensor(value)}
        self._places: dict[str, tuple[str, int | None]] = {}
        self._patterns: dict[str, str] = {}
        self._first_target: dict[tuple[str, ...], str] = {}

    def reads(self, name: str) -> bool:
        """Say whether the model has a place for a checkpoint tensor; valid for what :meth:`plan` has seen."""
        return name in self._places

    def plan(self, checkpoint: Mapping[str, torch.Tensor]) -> Sequence[Part]:
        """Say what is made of what; conversions are tried out on tensors without memory."""
        fused: dict[str, list[str]] = {}
        parts: list[Part] = []
        for name in sorted(checkpoint, key=dot_natural_key):
            target, pattern = self._rename(name)
            if target not in self._state:
                continue
            if pattern is None:
                self._places[name] = (target, None)
                parts.append(Part(sources=(name,), targets=(target,)))
            else:
                same = fused.setdefault(target, [])
                # The place in its list tells transformers which slice of a fused parameter it is.
                self._places[name] = (target, sum(self._patterns[other] == pattern for other in same))
                self._patterns[name] = pattern
                same.append(name)
        for target, names in fused.items():
            self._first_target[tuple(names)] = target
            made = self._convert(tuple(names), {name: self.slice(name, checkpoint[name]) for name in names})
            parts.append(Part(sources=tuple(names), targets=tuple(made)))
        return parts

    def _rename(self, name: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._state)
        if target not in self._state and name in self._state:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=self._state)
        return target, pattern

    def slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Cut out what this rank holds, by transformers' own rule; valid for what :meth:`plan` has seen.

        Raises:
            IncompatibleModel: the rank holds nothing of it.
        """
        target, index = self._places[name]
        cut = self._cuts.get(target)
        if cut is None:
            return tensor
        held: torch.Tensor | None = cut.shard_tensor(tensor, tensor_idx=index)
        if held is None:
            raise IncompatibleModel(
                f"tensor {name} lies on some ranks only, which is not supported",
                advice="serve this model with --tensor-parallel 1",
                details={"tensor": name},
            )
        return tensor if held.shape == tensor.shape else held.clone(memory_format=torch.contiguous_format)

    def build(self, part: Part, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make the runtime tensors of a part."""
        if part.sources not in self._first_target:
            return {part.targets[0]: tensors[part.sources[0]]}
        return self._convert(part.sources, tensors)

    def _convert(self, sources: tuple[str, ...], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        target = self._first_target[sources]
        rule: Any = copy.deepcopy(self._by_pattern[self._patterns[sources[0]]])
        for name in sources:
            rule.add_tensor(target, name, self._patterns[name], tensors[name])
        try:
            made = rule.convert(target, model=self._model, config=self._model.config)
        except ModelswapError:
            raise
        except Exception as error:
            raise IncompatibleModel(
                f"tensor {sources[0]} and the {len(sources) - 1} fused with it cannot become {target}: {error}",
                advice="their shapes or their number do not fit the config; save the checkpoint again",
                details={"tensor": sources[0]},
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def export(self, part: Part, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Give checkpoint tensors back, through transformers' own way of saving where something was converted."""
        if part.sources not in self._first_target:
            return {part.sources[0]: live[part.targets[0]]}
        saved: dict[str, torch.Tensor] = revert_weight_conversion(self._model, dict(live))
        return {name: tensor for name, tensor in saved.items() if name in part.sources}


def read_config(directory: str) -> PreTrainedConfig:
    """Read the architecture of a version.

    Raises:
        InvalidCheckpoint: ``config.json`` is missing or not JSON.
        IncompatibleModel: an architecture that this engine does not know, or a quantized one.
    """
    path = Path(directory) / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"config.json cannot be read: {error}", advice="copy the checkpoint again") from error
    if "quantization_config" in raw:
        raise IncompatibleModel(
            "config.json: quantization_config: quantized checkpoints are not supported by the embedded engine",
            advice="save the checkpoint in bfloat16, float16 or float32",
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise _unknown(raw, error) from error
    return config


def _unknown(raw: object, error: Exception) -> IncompatibleModel:
    named = raw.get("architectures") if isinstance(raw, dict) else None
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return IncompatibleModel(
        f"config.json: the architecture {named} cannot be served by the embedded engine: {first_line}",
        advice="use a causal language model that transformers knows without code from the checkpoint",
    )


def build_model(
    directory: str, checkpoint: Sequence[TensorRange], *, pace: Pace, place: Place = HOST
) -> PreTrainedModel:
    """Return a model filled with the version's tensors where they are to lie, each proven by hash.

    Raises:
        InsufficientMemory: the device is full.
        ModelswapError: the version is malformed, damaged, or not one this engine can serve.
    """
    kind, config, dtype = _checked(directory, checkpoint)
    device_map = None if place is HOST else {"": place.device}
    return _fill(kind, config, read_all(checkpoint, pace=pace, place=place), dtype=dtype, device_map=device_map)


def build_part(
    directory: str, checkpoint: Sequence[TensorRange], team: Team, *, pace: Pace
) -> tuple[PreTrainedModel, dict[str, str]]:
    """Return this rank's part of a model, and the hashes of what it holds of the tensors that are split.

    Raises:
        ModelswapError: as for :func:`build_model`, or the model cannot be split.
    """
    kind, config, dtype = _checked(directory, checkpoint)
    rules = _split(config, checkpoint, dtype=dtype, team=team)
    slices: dict[str, str] = {}
    tensors = {item.name: OnDemand(item, rules, slices, pace=pace) for item in checkpoint if rules.reads(item.name)}
    with team.lending_mesh():
        return _fill(kind, config, tensors, dtype=dtype, distributed_config=team.config), slices


def _checked(
    directory: str, checkpoint: Sequence[TensorRange]
) -> tuple[type[PreTrainedModel], PreTrainedConfig, torch.dtype]:
    """Return a version's class, config and dtype, once it is known that its tensors fit them."""
    config = read_config(directory)
    dtype = _dominant_dtype(checkpoint)
    skeleton = _skeleton(config, dtype)
    _check_fit(skeleton, checkpoint)
    return type(skeleton), config, dtype


def _split(
    config: PreTrainedConfig, checkpoint: Sequence[TensorRange], *, dtype: torch.dtype, team: Team
) -> TransformersLoader:
    """Split a model without memory over the team, and return its loading rules."""
    with initialization.no_tie_weights():  # as when it is loaded: first split, then tied
        skeleton: Any = _skeleton(config, dtype)
    try:
        loader = TransformersLoader(skeleton.maybe_distribute_model(skeleton, team.config, team.mesh))
    except ValueError as error:
        raise IncompatibleModel(
            f"{type(skeleton).__name__} cannot be split over {team.size} ranks: {error}",
            advice="serve it with --tensor-parallel 1, with several replicas if need be (--data-parallel)",
        ) from error
    loader.plan(meta_tensors(checkpoint))
    return loader


def _fill(
    kind: Any, config: PreTrainedConfig, tensors: Mapping[str, Any], *, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    try:
        loaded: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=_ATTENTION,
            output_loading_info=True,
            local_files_only=True,
            **options,
        )
    except ModelswapError:
        raise
    except torch.OutOfMemoryError as error:
        raise full(error) from error
    except Exception as error:
        raise _unknown({"architectures": config.architectures}, error) from error
    model, report = loaded
    if report["missing_keys"]:
        name = min(report["missing_keys"])
        raise IncompatibleModel(
            f"the checkpoint has nothing for parameter {name}",
            advice="the config and the tensors are not of the same model; save the checkpoint again",
            details={"tensor": name},
        )
    model.requires_grad_(False)
    return model


def _skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    factory: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = factory.from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=_ATTENTION, trust_remote_code=False
            )
    except Exception as error:
        raise _unknown({"architectures": config.architectures}, error) from error
    return skeleton


def _check_fit(skeleton: PreTrainedModel, checkpoint: Sequence[TensorRange]) -> None:
    """Refuse by names and shapes before a single tensor is read."""
    table = LiveTable(skeleton)
    loader = TransformersLoader(skeleton)
    shapes = meta_tensors(checkpoint)
    for group in fuse(loader.plan(shapes), table):
        for part in group.parts:
            for target, tensor in loader.build(part, {name: shapes[name] for name in part.sources}).items():
                table.check(target, tensor)


def _dominant_dtype(checkpoint: Sequence[TensorRange]) -> torch.dtype:
    """Return the floating dtype that most bytes of the checkpoint have: the dtype the model computes in."""
    sizes: Counter[torch.dtype] = Counter()
    for item in checkpoint:
        if dtype_of(item) in {torch.bfloat16, torch.float16, torch.float32}:
            sizes[dtype_of(item)] += item.nbytes
    if not sizes:
        raise IncompatibleModel(
            "the checkpoint has no tensor in bfloat16, float16 or float32",
            advice="save the checkpoint in one of these dtypes",
        )
    return sizes.most_common(1)[0][0]


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return how many token ids the model can embed."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def context_of(config: PreTrainedConfig) -> int:
    """Return how many positions the model was made for; 0 when its config does not say."""
    text = config.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value: Any = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def architecture_of(model: PreTrainedModel) -> str:
    """Return the name of the model's class, as ``architectures`` of a config names it."""
    return re.sub(r"^.*\.", "", type(model).__name__)
