"""Orders for a backend, made straight from checkpoint folders.

Reads safetensors headers by itself, so that a test does not prove the product's reader with the product's reader.
"""

import hashlib
import json
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from modelswap_engine.backends.port import Generate, Generation, Load, Reply, Sampling, Stage, TensorRange, Tokens

GREEDY = Sampling()


def ranges(directory: Path) -> tuple[TensorRange, ...]:
    """Return every tensor of a checkpoint with its true hash, sorted by name."""
    found: list[TensorRange] = []
    for file in sorted(directory.glob("*.safetensors")):
        data = file.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found.append(
                    TensorRange(
                        name=name,
                        dtype=entry["dtype"],
                        shape=tuple(entry["shape"]),
                        path=str(file),
                        offset=begin,
                        nbytes=end - begin,
                        sha256=hashlib.sha256(data[begin:end]).hexdigest(),
                    )
                )
    return tuple(sorted(found, key=lambda item: item.name))


def hashes_of(directory: Path) -> dict[str, str]:
    """Return name → sha256 of a checkpoint."""
    return {item.name: item.sha256 for item in ranges(directory)}


def digest_of(directory: Path) -> str:
    """Return an identity for a checkpoint; any function of its tensors will do for a backend."""
    text = json.dumps(hashes_of(directory), sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def load_order(directory: Path, *, operation_id: str = "load") -> Load:
    """Return the order to load a checkpoint."""
    return Load(
        operation_id=operation_id, digest=digest_of(directory), directory=str(directory), tensors=ranges(directory)
    )


def stage_order(
    old: Path, new: Path, *, operation_id: str, groups: Sequence[Sequence[str]] = (), drop_previous: bool = False
) -> Stage:
    """Return the order to stage what differs between two checkpoints, closed over fusion groups."""
    before = hashes_of(old)
    changed = {item.name for item in ranges(new) if before.get(item.name) != item.sha256}
    for group in groups:
        if changed & set(group):
            changed |= set(group)
    return Stage(
        operation_id=operation_id,
        digest=digest_of(new),
        directory=str(new),
        tensors=tuple(item for item in ranges(new) if item.name in changed),
        drop_previous=drop_previous,
    )


def accepted(replies: Sequence[Reply]) -> Reply:
    """Return the one reply, which must not be an error."""
    (reply,) = replies
    assert reply.error is None, reply.error
    return reply


def refused(replies: Sequence[Reply]) -> str:
    """Return the code of the one reply's error, which must be one."""
    (reply,) = replies
    assert reply.error is not None, reply
    return reply.error.code


def prompt(
    text: str, *, tokens: int = 16, request_id: str = "r", sampling: Sampling = GREEDY, eos: tuple[int, ...] = ()
) -> Generate:
    """Return a request whose prompt is the bytes of a text."""
    return Generate(
        request_id=request_id,
        prompt=tuple(8 + byte % 200 for byte in text.encode()),
        max_new_tokens=tokens,
        sampling=sampling,
        eos=eos,
    )


async def collect(stream: AsyncIterator[Tokens]) -> list[Tokens]:
    """Read a stream to its end."""
    return [item async for item in stream]


def ids(items: Sequence[Tokens]) -> list[int]:
    """Return the tokens of a stream."""
    return [token for item in items for token in item.tokens]


async def answer(backend: Generation, text: str, *, tokens: int = 16) -> list[int]:
    """Return the greedy answer to a text."""
    return ids(await collect(backend.generate(prompt(text, tokens=tokens))))


async def take(stream: AsyncIterator[Tokens], count: int) -> list[Tokens]:
    """Read a stream until it has given so many tokens."""
    items: list[Tokens] = []
    while len(ids(items)) < count:
        items.append(await anext(stream))
    return items
