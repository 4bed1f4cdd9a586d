"""LoRA adapters as folders for an engine that loads adapters by path: written by us, from proven bytes only.

Under one root, to which nobody else writes, and which the engine sees under the same path::

    adapters/<64 hex of the digest>/    adapter_config.json and adapter_model.safetensors; whole or not there

A folder never changes. Engines read one again whenever they like, some in the middle of a step, and end when it is not
there; so it stays for as long as a name leads to it, and a while longer. The user's own files never reach the engine:
its config is composed from what was understood of the adapter's, which leaves out everything else. It knows no engine.
"""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.adapters import LoadAdapter
from modelswap_engine.backends.external.copying import unwritable
from modelswap_engine.backends.external.folder import proven_pieces
from modelswap_engine.backends.external.materialise import MIB, used_bytes
from modelswap_engine.backends.port import TensorRange
from modelswap_engine.checkpoint.rules import DTYPE_BITS
from modelswap_engine.checkpoint.saving import compose_header, sync
from modelswap_engine.lora.config import parse_config
from modelswap_engine.protocol.errors import InsufficientDisk
from modelswap_engine.sources.adapter import CONFIG_FILE, WEIGHTS_FILE

_FOLDER: Final = "adapters"
_SPARE_BYTES: Final = MIB  # for what is not tensors
_READ_ONLY: Final = 0o444
_FOR_ALL: Final = 0o755  # the engine may run as another user


class AdapterFolders:
    """The folders, and which names lead to them.

    Args:
        root: shared with the engine under the same path; made when needed.
        limit_bytes: what all of the root may take, whoever wrote it; 0: as much as the file system has. Exceeding the
            limit of a pod's volume evicts the pod.
    """

    def __init__(self, root: Path, *, limit_bytes: int = 0) -> None:
        self._root = root.absolute() / _FOLDER
        self._limit_bytes = limit_bytes
        self._names: dict[str, str] = {}
        self._turn = asyncio.Lock()

    def owns(self, directory: str) -> bool:
        """Say whether a path is one of ours."""
        return Path(directory).parent == self._root

    async def write(self, order: LoadAdapter) -> Path:
        """Have the folder of an adapter's content, for the name in the order; one that is there is not written again.

        Raises:
            ManifestMismatch, InvalidCheckpoint, ChecksFailed: a tensor is not what was promised, or not fit to be used.
            SourceUnreadable, SourceChanged: its source failed.
            InsufficientDisk, Unavailable: the folder cannot be written.
        """
        destination, stop = self._of(order.digest), threading.Event()
        self._names[order.adapter_id] = order.digest
        async with self._turn:
            try:
                await asyncio.to_thread(self._write, destination, order, stop)
            except asyncio.CancelledError:
                stop.set()  # the thread ends at its next piece
                raise
        return destination

    def release(self, name: str) -> None:
        """A name leads nowhere any more; :meth:`collect` removes what no name leads to."""
        self._names.pop(name, None)

    async def collect(self) -> None:
        """Remove the folders that no name leads to. Never raises: what stays goes the next time."""
        async with self._turn:
            await asyncio.to_thread(_collect, self._root, {self._of(digest) for digest in self._names.values()})

    async def clear(self) -> None:
        """Remove them all: the engine holds no adapter, and reads none."""
        self._names.clear()
        await self.collect()

    def _write(self, destination: Path, order: LoadAdapter, stop: threading.Event) -> None:
        if destination.is_dir():
            return
        if self._limit_bytes:
            needed = _SPARE_BYTES + sum(module.a.nbytes + module.b.nbytes for module in order.modules)
            room = self._limit_bytes - used_bytes(self._root.parent)
            if needed > room:
                raise InsufficientDisk(
                    f"{self._root}: adapter {order.adapter_id} needs {needed / MIB:.1f} MiB, {room / MIB:.1f} MiB may "
                    "be used beside what is there",
                    advice="give the volume of the engine's checkpoints more room, or unload adapters",
                    details={"neededMiB": f"{needed / MIB:.1f}", "availableMiB": f"{room / MIB:.1f}"},
                )
        _write(destination, order, stop)

    def _of(self, digest: str) -> Path:
        return self._root / digest.removeprefix("sha256:")


def _write(destination: Path, order: LoadAdapter, stop: threading.Event) -> None:
    tensors = [tensor for module in order.modules for tensor in (module.a, module.b)]
    # Readers of the format count on each tensor beginning at a multiple of its elements' size.
    tensors.sort(key=lambda tensor: (-DTYPE_BITS.get(tensor.dtype, 0), tensor.name))
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _draft(destination) as draft:
            _file(draft / WEIGHTS_FILE, _safetensors(tensors, stop))
            _file(draft / CONFIG_FILE, [json.dumps(composed_config(order), indent=2).encode()])
            draft.chmod(_FOR_ALL)
            sync(draft)
            draft.rename(destination)
        sync(destination.parent)
    except OSError as error:
        raise unwritable(destination, error) from None


def _safetensors(tensors: Sequence[TensorRange], stop: threading.Event) -> Iterator[bytes | memoryview]:
    yield compose_header(tensors)
    for tensor in tensors:
        yield from proven_pieces(tensor, stop=stop)


def composed_config(order: LoadAdapter) -> dict[str, object]:
    """Return a config that says what is applied where, and nothing else; the values are those of the adapter's own."""
    config = parse_config(order.config.encode())
    settings = {module.target: (module.rank, config.alpha_of(module.target)) for module in order.modules}
    ranks, alphas = Counter(rank for rank, _ in settings.values()), Counter(alpha for _, alpha in settings.values())
    (rank, _), (alpha, _) = ranks.most_common(1)[0], alphas.most_common(1)[0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": _number(alpha),
        "use_rslora": config.rslora,
        "rank_pattern": {target: held for target, (held, _) in settings.items() if held != rank},
        "alpha_pattern": {target: _number(held) for target, (_, held) in settings.items() if held != alpha},
        "target_modules": sorted({target.rpartition(".")[2] for target in settings}),
        "bias": "none",
        "inference_mode": True,
    }


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else value


@contextlib.contextmanager
def _draft(destination: Path) -> Iterator[Path]:
    draft = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _file(path: Path, pieces: Iterator[bytes | memoryview] | Sequence[bytes]) -> None:
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fchmod(file.fileno(), _READ_ONLY)
        os.fsync(file.fileno())


def _collect(root: Path, kept: set[Path]) -> None:
    with contextlib.suppress(FileNotFoundError):
        for entry in list(root.iterdir()):
            if entry not in kept:
                shutil.rmtree(entry, ignore_errors=True)
