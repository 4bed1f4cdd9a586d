"""Taking over an engine that runs: what does it hold, and is that the version it must hold?

An engine that was started on the version is only looked at; of parameters whose checksums cannot be worked out from
files, what it then shows is how the version looks in it. One that holds another version of the same model gets the
tensors that differ. One that holds another model is not touched: engines die of it.
"""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.backends.external.folder import joined_sums
from modelswap_engine.backends.external.plain.live import Held, in_thread
from modelswap_engine.backends.external.plain.preflight import check_understood
from modelswap_engine.backends.external.plain.sums import Parameters, Sums, parameters, worked_out
from modelswap_engine.backends.port import Load, TensorRange
from modelswap_engine.checkpoint.canonical import CONFIG, architecture_of
from modelswap_engine.checkpoint.layout import read_contents
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from modelswap_engine.protocol.errors import ModelswapError

SHAPES_FILE: Final = "modelswap.shapes.json"
"""Beside the tensors of an exchange: names, shapes and dtypes of the whole model, for a sidecar that starts later."""

_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}
"""What files must hold so that nothing is converted, by the engine's ``--dtype``; ``auto`` is taken for bfloat16."""

_EVERYWHERE: Final = (Path("/"),)  # the engine's own folder: whoever started it chose where its links lead


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found: the parameters, and the version with the checksums that its parameters must have.

    ``converted`` are the parameters whose checksums cannot be worked out from files, ``digits`` how many hex digits of
    a sha256 the engine tells.
    """

    made: Parameters
    held: Held
    converted: frozenset[str]
    digits: int


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What an engine's checksums are of.

    Attributes:
        exact: they are of the very bytes of files, where nothing is converted: the model is whole, in plain memory.
        dtype: what the engine computes in, as it says itself.
        digits: how many hex digits of a sha256 it tells.
        loaded_from: the folder that it loaded last; None where that is not known.
    """

    exact: bool
    dtype: str
    digits: int
    loaded_from: Path | None


async def look(order: Load, live: Mapping[int, Sums], *, sight: Sight, recalled: Mapping[int, Sums]) -> Found:
    """Work out what an engine must show for a version, given what it shows.

    Args:
        order: the version.
        live: the checksums that every rank shows; "" where it shows that of nothing.
        sight: what they are of.
        recalled: remembered checksums of the version in the same layout, by rank.

    Raises:
        UnsupportedChange: this model is not understood.
        ModelswapError: the version's files cannot be read.
    """
    tensors = {item.name: item for item in order.tensors}
    made = parameters(sorted({name for sums in live.values() for name in sums}), tensors)
    check_understood(made)
    joined = await in_thread(joined_sums, tensors, {} if recalled else made.joins, stop=threading.Event())
    hashes = {name: item.sha256 for name, item in tensors.items()}
    known = worked_out(made, hashes, joined, digits=sight.digits)
    known |= {name: value for name, value in recalled.get(0, {}).items() if name in made.joins}
    converted = _converted(made, tensors, live, sight)
    shown = recalled or (live if await asyncio.to_thread(started_on, order, sight.loaded_from) else {})
    return Found(
        made=made,
        held=Held(
            digest=order.digest,
            directory=Path(order.directory),
            tensors=tensors,
            sums={
                rank: {
                    name: value
                    if name in made.own
                    else shown.get(rank, {}).get(name, "")
                    if name in converted
                    else known.get(name, "")
                    for name, value in sums.items()
                }
                for rank, sums in live.items()
            },
        ),
        converted=converted,
        digits=sight.digits,
    )


def _converted(
    made: Parameters, tensors: Mapping[str, TensorRange], live: Mapping[int, Sums], sight: Sight
) -> frozenset[str]:
    """Return the parameters that the engine does not hold, or not hash, as the bytes that the files have."""
    if not sight.exact:
        return frozenset(made.sources)
    hidden = {name for sums in live.values() for name, value in sums.items() if not value}
    return frozenset(
        name
        for name, sources in made.sources.items()
        if name in hidden or any(tensors[source].dtype != _DTYPES.get(sight.dtype, "BF16") for source in sources)
    )


def started_on(order: Load, folder: Path | None) -> bool:
    """Say whether the folder that the engine loaded last holds the version as a whole. Blocks."""
    if folder is None:
        return False
    if (folder / SHAPES_FILE).exists():
        return False  # one of our own folders: tensors of several versions are live
    if order.tensors and all(Path(item.path).parent == folder.resolve() for item in order.tensors):
        return True
    try:
        stated = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError):
        return False
    return stated.get("digest") == order.digest


def architecture_in(folder: Path) -> str:
    """Return the class of the model whose side files lie in a folder, "" where they do not say. Blocks."""
    file = folder / CONFIG
    return architecture_of({CONFIG: file.read_bytes()} if file.is_file() else {})


def same_model(order: Load, folder: Path) -> bool:
    """Say whether the engine runs a model with exactly the version's tensors, by name, shape and dtype.

    ``folder`` is the one that it loaded last. False too where that cannot be seen. Blocks.
    """
    wanted = {item.name: (item.dtype, item.shape) for item in order.tensors}
    try:
        kept = msgspec.json.decode((folder / SHAPES_FILE).read_bytes(), type=dict[str, _Shape])
        return {name: (item.dtype, item.shape) for name, item in kept.items()} == wanted
    except (OSError, msgspec.MsgspecError):
        pass
    try:
        tensors = read_contents(folder.resolve(), roots=_EVERYWHERE).tensors
    except (OSError, ModelswapError):
        return False
    return {name: (item.dtype, item.shape) for name, item in tensors.items()} == wanted


def shapes(tensors: Mapping[str, TensorRange]) -> bytes:
    """Return the content of the shapes file of a model."""
    return msgspec.json.encode({name: _Shape(item.dtype, item.shape) for name, item in tensors.items()})
