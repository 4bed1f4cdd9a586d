"""Checksums of an engine as hashes of checkpoint tensors. Pure.

A parameter with the right checksum proves the tensors that it is made of, so these answer with their own hashes. One
that is wrong answers with what it shows; one of which nothing is known is named as such.
"""

import fnmatch
from collections.abc import Iterator, Mapping

from modelswap_engine.backends.external.plain.live import Held
from modelswap_engine.backends.external.plain.sums import Parameters, Sums
from modelswap_engine.backends.port import Hashes, RuntimeHash


def hashes(held: Held, made: Parameters, live: Mapping[int, Sums], *, pattern: str, seconds: float) -> Hashes:
    """Return the answer for the tensors of a version whose names match a glob."""
    wanted = {name for name in held.tensors if fnmatch.fnmatchcase(name, pattern)}
    names = sorted(made.touched(wanted))
    wrong = {name: list(_differences(name, made.sources[name], held, live)) for name in names}
    unseen = {name for name in names if any(not sums.get(name) for sums in held.sums.values())}
    proved = {source for name in names if not wrong[name] and name not in unseen for source in made.sources[name]}
    proved |= {head for head, twin in made.tied if twin in proved}
    doubted = {source for name in names if wrong[name] or name in unseen for source in made.sources[name]}
    right = wanted & (proved - doubted)
    return Hashes(
        tensors={name: held.tensors[name].sha256 for name in sorted(right)},
        bytes=sum(held.tensors[name].nbytes for name in right),
        seconds=seconds,
        unverifiable=tuple(sorted(wanted - right)),
        runtime=tuple(item for name in names for item in wrong[name][:1]),
    )


def _differences(name: str, sources: tuple[str, ...], held: Held, live: Mapping[int, Sums]) -> Iterator[RuntimeHash]:
    for rank, sums in held.sums.items():
        expected, actual = sums.get(name, ""), live.get(rank, {}).get(name, "")
        if expected and actual != expected:
            yield RuntimeHash(name=name, sources=sources, expected=expected, actual=actual)
