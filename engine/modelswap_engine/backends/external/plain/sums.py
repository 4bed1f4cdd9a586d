"""What an engine's checksums of live tensors must be, worked out from a version's own hashes. Pure.

An engine hashes its own parameters and not the checkpoint's tensors: fused ones as one, and on a GPU, or where a model
is split, in a way that no file can be compared with. So a checksum is known in one of two ways. It is *worked out*
where the parameter is the very bytes of checkpoint tensors, one after the other; whether that holds is seen when an
engine has just loaded proven files. Else it is *remembered* from a load of the same version by the same engine. What
is known in neither way cannot be seen, and counts as neither right nor wrong.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from modelswap_engine.backends.external.folder import Join
from modelswap_engine.backends.port import TensorRange

DIGITS: Final = 64
"""Hex digits of a sha256; some engines tell fewer."""

_FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_TIED: Final = {"lm_head.weight": "model.embed_tokens.weight"}
_PADDED: Final = ("embed_tokens.weight", "lm_head.weight")
_PADDED_ROWS: Final = 64
_NOT_WEIGHTS: Final = (".rotary_emb.inv_freq",)  # older checkpoints hold what engines compute

Sums = Mapping[str, str]
"""Runtime name → checksum, of one rank."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How an engine's parameters are made of checkpoint tensors.

    Attributes:
        sources: runtime name → the checkpoint tensors that it is made of, in the order of its bytes.
        own: runtime names of what the engine makes by itself.
        zeros: runtime name → zero bytes after those of its tensors: vocabularies are made a multiple of 64 rows.
        tied: checkpoint tensors that are one parameter, each the whole of it.
        unread: checkpoint tensors that no parameter shows; whether the engine reads them cannot be said.
    """

    sources: Mapping[str, tuple[str, ...]]
    own: frozenset[str]
    zeros: Mapping[str, int] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    unread: frozenset[str] = frozenset()

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The fusion groups, by their first names; parameters with a tensor in common are one."""
        groups: list[set[str]] = []
        for names in (*self.sources.values(), *self.tied):
            mine = set(names)
            for group in [group for group in groups if not group.isdisjoint(mine)]:
                mine |= group
                groups.remove(group)
            groups.append(mine)
        return tuple(sorted(tuple(sorted(group)) for group in groups))

    @property
    def joins(self) -> dict[str, Join]:
        """The parameters that are more than one tensor, whose hash is not that of a tensor."""
        zeros = {name: self.zeros.get(name, 0) for name in self.sources}
        return {name: Join(names, zeros[name]) for name, names in self.sources.items() if len(names) > 1 or zeros[name]}

    def touched(self, names: Collection[str]) -> frozenset[str]:
        """Return the parameters that some checkpoint tensors are part of."""
        wanted = frozenset(names)
        return frozenset(name for name, parts in self.sources.items() if not wanted.isdisjoint(parts))


def parameters(runtime: Iterable[str], tensors: Mapping[str, TensorRange]) -> Parameters:
    """Say what is made of what, from the runtime names and a version's tensors."""
    known = frozenset(tensors)
    made = {name: _sources(name, known) for name in runtime}
    read = {source for names in made.values() for source in names}
    tied = tuple((head, twin) for head, twin in _TIED.items() if head in known - read and twin in read)
    unread = known - read - {head for head, _ in tied}
    return Parameters(
        sources={name: names for name, names in made.items() if names},
        own=frozenset(name for name, names in made.items() if not names),
        zeros={name: _zeros(tensors[names[0]]) for name, names in made.items() if names and name.endswith(_PADDED)},
        tied=tied,
        unread=frozenset(name for name in unread if not name.endswith(_NOT_WEIGHTS)),
    )


def _zeros(tensor: TensorRange) -> int:
    rows = tensor.shape[0] if tensor.shape else 0
    return tensor.nbytes // rows * (-rows % _PADDED_ROWS) if rows else 0


def _sources(name: str, checkpoint: frozenset[str]) -> tuple[str, ...]:
    if name in checkpoint:
        return (name,)
    for fused, parts in _FUSED.items():
        names = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
        if f".{fused}." in name and checkpoint.issuperset(names):
            return names
    tied = _TIED.get(name, "")
    return (tied,) if tied in checkpoint else ()


def worked_out(
    made: Parameters, hashes: Mapping[str, str], joined: Mapping[str, str], *, digits: int
) -> dict[str, str]:
    """Return the checksums of parameters that are the very bytes of checkpoint tensors.

    Args:
        made: what is made of what.
        hashes: sha256 of checkpoint tensors by name; a parameter with an unknown one is left out.
        joined: sha256 of those in ``made.joins``, as far as they are known.
        digits: how many hex digits of a sha256 the engine tells.
    """
    single = {
        name: hashes[names[0]] for name, names in made.sources.items() if name not in made.joins and names[0] in hashes
    }
    return {name: value[:digits] for name, value in {**single, **joined}.items()}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How live tensors compare with what they must be: parameters that are wrong, and those nothing is known of."""

    wrong: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """True when everything was seen and is as it must be."""
        return not self.wrong and not self.unseen


def judge(live: Sums, expected: Sums) -> Verdict:
    """Compare the checksums of one rank; a parameter that is missing, or one too many, is wrong."""
    gone_or_new = live.keys() ^ expected.keys()
    differing = {name for name, value in expected.items() if value and live.get(name) != value}
    return Verdict(
        wrong=tuple(sorted(gone_or_new | differing)),
        unseen=tuple(sorted(name for name, value in expected.items() if not value and name in live)),
    )


def after(live: Sums, *, touched: Collection[str], known: Sums) -> dict[str, str]:
    """Return what a rank's checksums must be once some parameters were exchanged; "" where nothing is known.

    Args:
        live: what they are, and stay for all other parameters.
        touched: the parameters that are exchanged.
        known: their checksums in the new version, as far as they are known.
    """
    return {name: known.get(name, "") if name in touched else value for name, value in live.items()}
