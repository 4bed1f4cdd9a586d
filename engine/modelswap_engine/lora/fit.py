"""Whether an adapter fits the running base, and what is to be applied where. Pure: nothing is read but headers.

Which modules an adapter changes is said by its tensors alone; its config says by how much. A tensor that is not one of
a plain low-rank pair is refused by what it is, never left out: an adapter that is applied in part answers wrongly.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from modelswap_engine.backends.adapters import AdapterLayout, AdapterModule, AdapterTarget
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.checkpoint.rules import refuse
from modelswap_engine.lora.config import AdapterConfig
from modelswap_engine.protocol.errors import AdapterLimit, IncompatibleAdapter, UnsupportedAdapter
from modelswap_engine.sources.adapter import WEIGHTS_FILE

_PAIR: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES: Final = frozenset({"F32", "F16", "BF16"})
_KINDS: Final = (
    (re.compile(r"lora_magnitude_vector"), "a magnitude of DoRA"),
    (re.compile(r"lora_embedding_[AB]"), "an adapter of an embedding"),
    (re.compile(r"lora_[AB]\.bias$"), "a bias in the adapter"),
    (re.compile(r"\.(modules_to_save|token_adapter|trainable_tokens)"), "a trained module or embedding"),
    (re.compile(r"\.bias$"), "a trained bias"),
)
_COLD: Final = "merge the adapter into its base and deploy that as a version"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The two matrices of one module; the hashes of their bytes are not known yet."""

    target: AdapterTarget
    rank: int
    scaling: float
    a: TensorEntry
    b: TensorEntry

    def module(self, range_of: Callable[[TensorEntry], TensorRange]) -> AdapterModule:
        """Return what the engine is told of it."""
        return AdapterModule(
            target=self.target.name, rank=self.rank, scaling=self.scaling, a=range_of(self.a), b=range_of(self.b)
        )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """An adapter as this engine would apply it; ``nbytes`` in runtime layout, ``rank`` the highest."""

    pairs: tuple[Pair, ...]
    rank: int
    nbytes: int


def fit(name: str, config: AdapterConfig, tensors: Mapping[str, TensorEntry], layout: AdapterLayout) -> Fit:
    """Hold an adapter against the base.

    Raises:
        AdapterLimit: the engine has no slots, or a rank is higher than it was started for.
        UnsupportedAdapter: a tensor is not of a plain low-rank pair, or of a module that cannot be changed here.
        IncompatibleAdapter: the base has no such module, or it has another shape.
    """
    if not layout.slots:
        raise AdapterLimit(
            f"adapter {name}: this engine serves no adapters: {layout.reason}",
            advice=f"start it with {layout.options.slots}",
        )
    targets = {target.name: target for target in layout.targets}
    sides: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in tensors.items():
        module, side = _split(key)
        if module not in targets:
            _refuse_module(name, module, layout)
        sides.setdefault(module, {})[side] = entry
    if not sides:
        refuse("the adapter has no tensors", file=WEIGHTS_FILE)
    pairs = tuple(_pair(config, targets[module], found, layout=layout) for module, found in sorted(sides.items()))
    values = sum(pair.rank * (pair.target.inputs + pair.target.outputs) for pair in pairs)
    return Fit(pairs=pairs, rank=max(pair.rank for pair in pairs), nbytes=values * layout.element_bytes)


def check_base(name: str, base_digest: str, live_digest: str) -> None:
    """Refuse an adapter that is bound to another base than the live one.

    Raises:
        IncompatibleAdapter: it is.
    """
    if base_digest and base_digest != live_digest:
        raise IncompatibleAdapter(
            f"adapter {name} is for base {base_digest}, {live_digest or 'none'} is live",
            advice="load it together with that base (adapters.sources of the swap), or the adapter for this base",
            details={"adapter": name, "expected": base_digest, "actual": live_digest},
        )


def _split(key: str) -> tuple[str, str]:
    match = _PAIR.fullmatch(key)
    if match is None:
        kind = next((what for pattern, what in _KINDS if pattern.search(key)), "not a matrix of a plain LoRA")
        raise UnsupportedAdapter(
            f"{WEIGHTS_FILE}: tensor {key!r} is {kind}, which cannot be applied here",
            advice=f"save it without, or {_COLD}",
            details={"tensor": key},
        )
    return match["module"], match["side"]


def _refuse_module(name: str, module: str, layout: AdapterLayout) -> NoReturn:
    why = next((why for held, why in layout.refused.items() if module == held or module.startswith(f"{held}.")), "")
    if why:
        raise UnsupportedAdapter(
            f"adapter {name}: module {module} cannot be changed by an adapter here: {why}",
            advice=f"train it without that module, or {_COLD}",
            details={"module": module},
        )
    raise IncompatibleAdapter(
        f"adapter {name}: the base has no module {module}",
        advice="the adapter was trained on another architecture; load the one for this base",
        details={"module": module},
    )


def _pair(
    config: AdapterConfig, target: AdapterTarget, found: Mapping[str, TensorEntry], *, layout: AdapterLayout
) -> Pair:
    for side in "AB":
        if side not in found:
            refuse(f"module {target.name} has no lora_{side}", file=WEIGHTS_FILE)
    a, b = found["A"], found["B"]
    rank = config.rank_of(target.name)
    for entry, shape in ((a, (rank, target.inputs)), (b, (target.outputs, rank))):
        if entry.dtype not in _DTYPES:
            raise UnsupportedAdapter(
                f"{WEIGHTS_FILE}: tensor {entry.name!r} is {entry.dtype}",
                advice=f"save it in {', '.join(sorted(_DTYPES))}",
                details={"tensor": entry.name},
            )
        if entry.shape != shape:
            raise IncompatibleAdapter(
                f"{WEIGHTS_FILE}: tensor {entry.name!r} has shape {list(entry.shape)}, rank {rank} on this base means "
                f"{list(shape)}",
                advice="the adapter is for a base of another size, or its config says another rank",
                details={"tensor": entry.name, "expected": str(list(shape)), "actual": str(list(entry.shape))},
            )
    if rank > layout.max_rank:
        raise AdapterLimit(
            f"{WEIGHTS_FILE}: module {target.name} has rank {rank}, at most {layout.max_rank} is served",
            advice=f"start the engine with a higher {layout.options.rank}",
            details={"rank": str(rank), "maxRank": str(layout.max_rank)},
        )
    return Pair(target=target, rank=rank, scaling=config.scaling_of(target.name), a=a, b=b)
