"""Tensors in memory, torch's or numpy's, as a version to publish. Imports neither library.

No second copy of all of it is made: each tensor is hashed, and later sent, in pieces that are copied out of it. Whoever
publishes may not train on while it lasts; what was changed meanwhile is refused.
"""

import hashlib
import sys
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from modelswap_engine.checkpoint.canonical import architecture_of, side_file
from modelswap_engine.checkpoint.crew import Progress
from modelswap_engine.checkpoint.dtypes import safetensors_dtype
from modelswap_engine.checkpoint.manifest import Manifest, Provenance, TensorEntry, make_manifest
from modelswap_engine.checkpoint.rules import check_tensor_name, expected_nbytes
from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.publishing.plan import SHARD_BYTES, check_side_files, compose

PIECE_BYTES: Final = 4 << 20
_WHAT: Final = "tensors to publish"
_AT_ONCE: Final = 4
"""Tensors that are hashed at the same time; each may need one copy of itself where it is not contiguous."""


class TensorsVersion:
    """See the module, and :class:`publishing.port.Version`.

    Args:
        tensors: name → tensor; names are those of the checkpoint.
        side_files: by name.
        prefer: names that count where two are of one storage (tied weights); the first of them does otherwise.
        provenance: where it comes from.
        shard_bytes: how large files may be.
        progress: told (bytes hashed, bytes in all), never from two threads at once.

    Raises:
        BadRequest: something that is no dense tensor, or of a dtype that safetensors does not have; no tensors.
        InvalidCheckpoint: a name that no checkpoint may have.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        side_files: Mapping[str, bytes],
        prefer: frozenset[str] = frozenset(),
        provenance: Provenance | msgspec.UnsetType = msgspec.UNSET,
        shard_bytes: int = SHARD_BYTES,
        progress: Progress | None = None,
    ) -> None:
        described = {name: _entry(name, tensor) for name, tensor in tensors.items()}
        self._tensors = untied(tensors, prefer=prefer)
        self.side_files = check_side_files(side_files)
        entries = [described[name] for name in self._tensors]
        if not entries:
            raise BadRequest("there are no tensors to publish", advice="pass model.state_dict()")
        hashed = {
            entry.name: msgspec.structs.replace(entry, sha256=sha256)
            for entry, sha256 in zip(entries, self._hashes(entries, progress), strict=True)
        }
        sides = {name: side_file(name, data) for name, data in side_files.items()}
        bare = make_manifest(hashed, sides, architecture=architecture_of(side_files))
        self.manifest: Manifest
        bare = msgspec.structs.replace(bare, provenance=provenance)
        self.manifest, self.files = compose(bare, shard_bytes=shard_bytes)

    def _hashes(self, entries: list[TensorEntry], progress: Progress | None) -> list[str]:
        total, done, found = sum(entry.nbytes for entry in entries), 0, []
        with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="hashing") as pool:
            for entry, sha256 in zip(entries, pool.map(self._hash, entries), strict=True):
                found.append(sha256)
                done += entry.nbytes
                if progress is not None:
                    progress(done, total)
        return found

    def _hash(self, entry: TensorEntry) -> str:
        digest = hashlib.sha256()
        for piece in self.pieces(entry.name):
            digest.update(piece)
        return digest.hexdigest()

    def signature(self, manifest: bytes) -> bytes:
        """Nobody signed it yet."""
        return b""

    def pieces(self, name: str) -> Generator[memoryview, None, None]:
        """Copy a tensor out, piece by piece."""
        tensor = self._tensors[name]
        flat = _flat_of_torch(tensor) if _is_torch(tensor) else _flat_of_numpy(tensor)
        for at in range(0, len(flat), PIECE_BYTES):
            piece = flat[at : at + PIECE_BYTES]
            yield memoryview(piece.cpu().numpy() if _is_torch(piece) else piece)


def untied(tensors: Mapping[str, Any], *, prefer: frozenset[str]) -> dict[str, Any]:
    """Return tensors without those that are another one of them under a second name, as checkpoints have them."""
    named: dict[object, str] = {}
    for name, tensor in tensors.items():
        place = _place(tensor)
        if place not in named or (name in prefer and named[place] not in prefer):
            named[place] = name
    kept = set(named.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def _place(tensor: Any) -> object:
    """Return what two names of one tensor have in common; an object of its own for all else."""
    if not _is_torch(tensor) or not tensor.numel():
        return object()
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _is_torch(tensor: Any) -> bool:
    return hasattr(tensor, "detach") and hasattr(tensor, "element_size")


def _entry(name: str, tensor: Any) -> TensorEntry:
    check_tensor_name(name, file=_WHAT)
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        raise BadRequest(f"{name!r} is {type(tensor).__name__} and no tensor", advice="leave it out")
    if _is_torch(tensor) and (str(tensor.layout) != "torch.strided" or tensor.device.type == "meta"):
        raise BadRequest(
            f"{name!r} has no bytes of its own here ({tensor.layout}, {tensor.device})",
            advice="gather the whole state dict first",
        )
    if hasattr(tensor, "full_tensor"):
        raise BadRequest(f"{name!r} is spread over ranks", advice="gather the whole state dict on one rank first")
    # numpy's text of a dtype tells the order of bytes too
    dtype, shape = (
        safetensors_dtype(getattr(tensor.dtype, "name", str(tensor.dtype))),
        tuple(int(size) for size in tensor.shape),
    )
    nbytes = expected_nbytes(dtype, shape, file=_WHAT, tensor=name)
    return TensorEntry(name=name, dtype=dtype, shape=shape, nbytes=nbytes, file="", offset=0)


def _flat_of_torch(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8)


def _flat_of_numpy(tensor: Any) -> Any:
    numpy: Any = sys.modules["numpy"]
    array = numpy.ascontiguousarray(tensor)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(numpy.uint8)
