"""A small module with every kind of loading rule, and versions of it on disk, for tests of the weights core.

Tied (``embed``/``head``), fused (q, k and v into ``qkv``), split (``gate_up`` into ``gate`` and ``up``), transposed
(``out``), widened (``scale``, bfloat16 on disk, float32 live), plain (``norm``) and a scalar buffer (``steps``).
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from modelswap_engine.backends.port import Stage, TensorRange
from modelswap_engine.weights.mapping import Part

_F32, _BF16 = torch.float32, torch.bfloat16
KINDS = {_F32: "F32", _BF16: "BF16", torch.int64: "I64"}
SOURCES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed": ((8, 4), _F32),
    "q": ((4, 4), _F32),
    "k": ((2, 4), _F32),
    "v": ((2, 4), _F32),
    "gate_up": ((6, 4), _BF16),
    "out": ((4, 6), _F32),
    "scale": ((4,), _BF16),
    "norm": ((4,), _BF16),
    "steps": ((), torch.int64),
}
PARTS = (
    Part(("embed",), ("embed",)),
    Part(("q", "k", "v"), ("qkv",)),
    Part(("gate_up",), ("gate", "up")),
    Part(("out",), ("out",)),
    Part(("scale",), ("scale",)),
    Part(("norm",), ("norm",)),
    Part(("steps",), ("steps",)),
)


class LabModule(torch.nn.Module):
    """Holds the runtime tensors; ``alias`` is a second tensor object over the memory of ``norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.head = self.embed
        self.qkv = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.gate = torch.nn.Parameter(torch.zeros(3, 4, dtype=_BF16), requires_grad=False)
        self.up = torch.nn.Parameter(torch.zeros(3, 4, dtype=_BF16), requires_grad=False)
        self.out = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(4, dtype=_BF16), requires_grad=False)
        self.alias = torch.nn.Parameter(self.norm.data, requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


class LabLoader:
    """The loading rules of :class:`LabModule`."""

    def plan(self, checkpoint: Mapping[str, torch.Tensor]) -> Sequence[Part]:
        return [part for part in PARTS if set(part.sources) <= checkpoint.keys()]

    def slice(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def build(self, part: Part, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        match part.targets:
            case ("qkv",):
                return {"qkv": torch.cat([tensors[name] for name in part.sources])}
            case ("gate", "up"):
                gate, up = tensors["gate_up"].chunk(2)
                return {"gate": gate, "up": up}
            case ("out",):
                return {"out": tensors["out"].T}
        return {part.targets[0]: tensors[part.sources[0]]}

    def export(self, part: Part, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        match part.targets:
            case ("qkv",):
                return dict(zip(part.sources, live["qkv"].split([4, 2, 2]), strict=True))
            case ("gate", "up"):
                return {"gate_up": torch.cat([live["gate"], live["up"]])}
            case ("out",):
                return {"out": live["out"].T}
        return {part.sources[0]: live[part.targets[0]]}


@dataclasses.dataclass(frozen=True)
class LabVersion:
    """A whole version on disk."""

    digest: str
    tensors: Mapping[str, torch.Tensor]
    ranges: tuple[TensorRange, ...]

    def hashes(self) -> dict[str, str]:
        return {item.name: item.sha256 for item in self.ranges}

    def order(self, operation_id: str, names: Iterable[str], *, keep_previous: bool = True) -> Stage:
        wanted = set(names)
        return Stage(
            operation_id=operation_id,
            digest=self.digest,
            directory="",
            tensors=tuple(item for item in self.ranges if item.name in wanted),
            keep_previous=keep_previous,
        )


def random_tensors(seed: int, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return random tensors for some of the sources."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        shape, dtype = SOURCES[name]
        if dtype is torch.int64:
            made[name] = torch.randint(0, 1 << 40, shape, generator=generator)
        else:
            made[name] = torch.randn(shape, generator=generator).to(dtype)
    return made


def write_version(path: Path, tensors: Mapping[str, torch.Tensor]) -> LabVersion:
    """Write tensors one after the other into a file."""
    ranges: list[TensorRange] = []
    data = bytearray()
    for name, tensor in sorted(tensors.items()):
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ranges.append(
            TensorRange(
                name=name,
                dtype=KINDS[tensor.dtype],
                shape=tuple(tensor.shape),
                path=str(path),
                offset=len(data),
                nbytes=len(raw),
                sha256=hashlib.sha256(raw).hexdigest(),
            )
        )
        data += raw
    path.write_bytes(data)
    return LabVersion("sha256:" + hashlib.sha256(data).hexdigest(), dict(tensors), tuple(ranges))


def fill(module: LabModule, version: LabVersion) -> LabModule:
    """Load a version from scratch, without the code under test."""
    tensors = version.tensors
    module.embed.data = tensors["embed"].clone()
    module.qkv.data = torch.cat([tensors["q"], tensors["k"], tensors["v"]])
    module.gate.data, module.up.data = (half.clone() for half in tensors["gate_up"].chunk(2))
    module.out.data = tensors["out"].T.contiguous()
    module.scale.data = tensors["scale"].float()
    module.norm.data = module.alias.data = tensors["norm"].clone()
    module.steps.data = tensors["steps"].clone()
    return module


def state_bytes(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the bytes of every runtime tensor of a state dictionary."""
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in state.items()
    }
