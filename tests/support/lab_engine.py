"""A tiny foreign engine in this process: fused, tied and packed weights, loading rules of its own, no transformers.

It stands in for vLLM and SGLang in tests of our half in their processes, and does what they do to weights: q, k and v
are one parameter, linear layers are packed (the parameter is empty afterwards, the weight is in a function), the head
is tied on demand and packed beside its tensor, adapters may be wrapped around a layer, embeddings are padded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.inprocess.agent import Agent, AgentSettings
from modelswap_engine.backends.inprocess.state import read_linear
from modelswap_engine.backends.inprocess.ways import Ways
from modelswap_engine.backends.port import Stage
from modelswap_engine.limits import Memory
from modelswap_engine.weights.version import Method
from tests.support.orders import load_order, stage_order

HIDDEN, VOCABULARY, PADDED, LAYERS = 96, 40, 64, 2


def shapes(*, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the checkpoint's tensors."""
    found: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        found |= {f"layers.{layer}.{name}.weight": (HIDDEN // 3, HIDDEN) for name in "qkv"}
        found |= {f"layers.{layer}.{name}.bias": (HIDDEN // 3,) for name in "qkv"}
        found[f"layers.{layer}.o.weight"] = (HIDDEN, HIDDEN)
    return found if tied else found | {"head.weight": (VOCABULARY, HIDDEN)}


def write(folder: Path, *, seed: int, dtype: torch.dtype = torch.float32, tied: bool = False) -> Path:
    """Write a checkpoint."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes(tied=tied).items()}
    save_file({name: tensor.to(dtype) for name, tensor in made.items()}, folder / "model.safetensors")
    return folder


class Layer(torch.nn.Module):
    """A linear layer, or an embedding, that knows how it is loaded and packed."""

    def __init__(self, outputs: int, inputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(outputs), requires_grad=False)

    def pack(self, *, remove: bool) -> None:
        held = self.weight.detach().T.contiguous()  # another order of the same values
        self.applied: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows @ held
        if remove:
            self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Wrapped(torch.nn.Module):
    """An adapter's layer around another."""

    def __init__(self, inner: Layer) -> None:
        super().__init__()
        self.base_layer = inner


class Model(torch.nn.Module):
    """Embedding, some layers, norm, head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.embed = Layer(PADDED, HIDDEN)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"qkv": Layer(HIDDEN, HIDDEN, bias=True), "o": Layer(HIDDEN, HIDDEN)})
            for _ in range(LAYERS)
        )
        self.norm = torch.nn.Parameter(torch.empty(HIDDEN), requires_grad=False)
        self.head = Layer(PADDED, HIDDEN)
        if tied:
            self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            path, _, kind = name.rpartition(".")
            parent, _, leaf = path.rpartition(".")
            if leaf in {"q", "k", "v"}:
                whole = own[f"{parent}.qkv.{kind}"].data
                target = whole.narrow(0, "qkv".index(leaf) * (HIDDEN // 3), HIDDEN // 3)
            elif leaf in {"embed", "head"}:
                if leaf == "head" and self.tied:
                    continue
                target = own[name][:VOCABULARY].data
                own[name][VOCABULARY:].data.fill_(0)
            else:
                target = own["norm" if path == "norm" else name].data
            if target.shape != tensor.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}")
            target.copy_(tensor)

    def pack(self) -> None:
        for layer in self.layers:
            layer["qkv"].pack(remove=True)
            layer["o"].pack(remove=True)
        self.head.pack(remove=False)

    def forward(self, token: int) -> torch.Tensor:
        state = self.embed.weight[token]
        for layer in self.layers:
            qkv, o = (getattr(layer[name], "base_layer", layer[name]) for name in ("qkv", "o"))
            state = state + torch.tanh(o.applied(torch.tanh(qkv.applied(state) + qkv.bias)))
        found: torch.Tensor = self.head.applied(state * self.norm)[:VOCABULARY]
        return found


class LabHost:
    """The engine as our half sees it.

    Attributes:
        requests: how many hold cached keys and values; None where only the engine's routes can drop those.
        noted: what it was told around an exchange, in order.
    """

    def __init__(
        self, folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, frugal: bool = True
    ) -> None:
        self.rank, self.ranks, self.software, self.architecture = 0, 1, "lab 1", "LabForCausalLM"
        self.refused = ""
        self.wiped = 0
        self.settled_times = 0
        self.requests: int | None = None
        self.noted: list[str] = []
        self._tied, self._dtype, self._frugal = tied, dtype, frugal
        self.method = Method.POINTER
        self.model = self._fresh("cpu")
        self.load_directly(folder)
        self.model.pack()
        self.loading: Callable[[], None] = lambda: None

    def _fresh(self, device: str) -> Model:
        with torch.device(device):
            model = Model(tied=self._tied).to(self._dtype)
        if self._tied:
            model.head.weight = model.embed.weight
        return model

    def load_directly(self, folder: Path) -> None:
        self.model.load_weights(sorted(load_file(folder / "model.safetensors").items()))

    def wrap(self) -> None:
        """Wrap adapters around some layers, as an engine does when it is started with them."""
        for layer in self.model.layers:
            layer["o"] = Wrapped(layer["o"])

    def refusal(self) -> str:
        return self.refused

    def ways(self) -> Ways:
        return Ways(method=self.method)

    def adapter_modules(self) -> tuple[str, ...]:
        return tuple(name for name, module in self.model.named_modules() if isinstance(module, Wrapped))

    def live(self) -> Mapping[str, torch.nn.Module]:
        return {name.replace(".base_layer", ""): module for name, module in self.model.named_modules()}

    def skeleton(self) -> torch.nn.Module:
        return self._fresh("meta" if self._frugal else "cpu")

    def load(self, skeleton: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loading()
        assert isinstance(skeleton, Model)
        skeleton.load_weights(weights)

    def packed_attribute(self, module: torch.nn.Module) -> str:
        return "applied" if "applied" in module.__dict__ else ""

    def pack(self, module: torch.nn.Module) -> object:
        assert isinstance(module, Layer)
        module.pack(remove=True)
        return module.__dict__.pop("applied")

    def unpack(self, packed: object, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        assert callable(packed)
        return read_linear(packed, shape, dtype)

    def wipe(self) -> None:
        self.wiped += 1

    def forget(self) -> bool | None:
        self.noted.append(f"forget at {float(self.model.norm[0]):.3f}")
        return None if self.requests is None else not self.requests

    def called(self, digest: str) -> None:
        self.noted.append(f"called {digest}")

    def settled(self) -> None:
        self.settled_times += 1

    def says(self) -> torch.Tensor:
        """Return what the live model answers to every token."""
        return torch.stack([self.model(token) for token in range(VOCABULARY)])


class Lab:
    """An engine, our half in it, and somebody who calls it as the sidecar does."""

    def __init__(
        self,
        host: LabHost,
        *,
        settings: AgentSettings | None = None,
        busy: Callable[[], bool] = lambda: False,
        bound: Callable[[], Memory] = Memory,
    ) -> None:
        self.host = host
        self.agent = Agent(host, boot_id="boot", settings=settings, busy=busy, bound=bound)
        self._number = 0

    def call(self, call: wire.Call) -> wire.Answer:
        """Call, and return the first answer."""
        self._number += 1
        answer = wire.decode_answer(self.agent.answer(wire.encode_call(self._number, call)))
        assert answer.number == self._number
        return answer

    def outcome(self, call: wire.AdoptCall | wire.StageCall | wire.VerifyCall | wire.HashesCall) -> wire.Answer:
        """Make a long call and wait for its outcome."""
        answer = self.call(call)
        while answer.running:
            threading.Event().wait(0.002)
            answer = self.call(wire.ProgressCall(work=call.work))
        return answer

    def adopt(self, folder: Path, *, work: str = "adopt") -> wire.Answer:
        """Adopt a version."""
        return self.outcome(wire.AdoptCall(work=work, order=load_order(folder)))

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the fusion groups."""
        layout = self.call(wire.LayoutCall()).layout
        assert layout is not None
        return layout.groups

    def order(self, old: Path, new: Path, operation: str) -> Stage:
        """Return the order to stage what differs."""
        return stage_order(old, new, operation_id=operation, groups=self.groups())

    def swap(self, old: Path, new: Path, operation: str) -> Iterator[wire.Answer]:
        """Go through a whole exchange; yields the answer to each step."""
        yield self.outcome(wire.StageCall(work=f"stage-{operation}", order=self.order(old, new, operation)))
        yield self.call(wire.PrepareCall(operation_id=operation))
        yield self.call(wire.CommitCall(operation_id=operation))
        yield self.outcome(wire.VerifyCall(work=f"verify-{operation}", operation_id=operation, strict=True))
