"""What is refused before an engine is touched, because it dies of it or takes it without a word.

A tensor of another shape, a file that is cut short and one that is not safetensors end the whole server; a tensor that
is missing, foreign, padded or not a number is loaded and answered with success. Bytes are looked at where the folder
for the engine is written (``external/folder.py``); here are names, shapes and dtypes, which cost nothing. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NoReturn

from modelswap_engine.backends.external.plain.sums import Parameters
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.protocol.errors import IncompatibleModel, InvalidCheckpoint, UnsupportedChange

_COLD: Final = "serve this version by a restart of the engine on it"
_NAMED: Final = 3


def check_fit(tensors: Sequence[TensorRange], reference: Mapping[str, TensorRange]) -> None:
    """Refuse tensors that are not, by name, shape and dtype, some of those the engine was started with.

    Raises:
        IncompatibleModel: names the tensor and what is wrong with it.
        InvalidCheckpoint: a tensor comes twice.
        UnsupportedChange: there is none: an engine would call it a success and change nothing.
    """
    if not tensors:
        raise UnsupportedChange("the version has no tensor to exchange", advice="look at the plan of the swap")
    seen: set[str] = set()
    for wanted in tensors:
        if wanted.name in seen:
            raise InvalidCheckpoint(f"tensor {wanted.name} comes twice", advice="save the checkpoint again")
        seen.add(wanted.name)
        known = reference.get(wanted.name)
        if known is None:
            _refuse(wanted, "is not part of the running model", "")
        if wanted.shape != known.shape:
            _refuse(wanted, f"has shape {list(wanted.shape)}", f"shape {list(known.shape)}")
        if wanted.dtype != known.dtype:
            _refuse(wanted, f"has dtype {wanted.dtype}", f"dtype {known.dtype}")


def _refuse(wanted: TensorRange, what: str, expected: str) -> NoReturn:
    against = f", the running model has {expected}" if expected else ""
    raise IncompatibleModel(f"tensor {wanted.name} {what}{against}", advice=_COLD, details={"tensor": wanted.name})


def check_whole(made: Parameters, changed: Iterable[str]) -> None:
    """Refuse changes that would reach a parameter in part.

    Raises:
        IncompatibleModel: a tensor of a fusion group is missing.
    """
    names = frozenset(changed)
    for group in made.groups:
        missing = sorted(set(group) - names)
        if missing and len(missing) < len(group):
            raise IncompatibleModel(
                f"tensor {missing[0]} is missing beside the others of its parameter ({', '.join(group[:_NAMED])})",
                advice="stage whole fusion groups",
                details={"tensor": missing[0]},
            )


def check_understood(made: Parameters) -> None:
    """Refuse models some of whose tensors cannot be found among the engine's parameters.

    Raises:
        UnsupportedChange: names one of them.
    """
    for name in _strange(made):
        raise UnsupportedChange(
            f"the engine shows no parameter that is made of tensor {name}, so nothing can be said of it after a swap",
            advice="serve versions of this model by a restart of the engine",
            details={"tensor": name},
        )


def _strange(made: Parameters) -> Iterator[str]:
    yield from sorted(made.unread)
