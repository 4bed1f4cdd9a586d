"""Adapters on their own rows of a packed batch, against weights into which each adapter was merged."""

import copy
import itertools
import threading
from collections.abc import Sequence

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from modelswap_engine.backends.embedded.lora.content import LoadedAdapter, Pair
from modelswap_engine.backends.embedded.lora.layers import AdapterLayers

WIDTH, RANK = 8, 3


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = torch.nn.Parameter(torch.zeros(2, 3, 4))


class Tiny(torch.nn.Module):
    """A head that sees the last token only, a gate that sees some tokens, and modules that see all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = torch.nn.LayerNorm(2 * WIDTH)
        self.down = Conv1D(WIDTH, 2 * WIDTH)
        self.some = torch.nn.Linear(WIDTH, WIDTH)
        self.never = torch.nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.head = torch.nn.Linear(WIDTH, 16)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.norm(self.up(self.embed(tokens))))
        hidden = torch.cat([hidden[:, :1], hidden[:, 1:] + self.some(hidden[:, 1:])], dim=1)
        self.head(hidden[:, -1:])
        return hidden


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    tiny = Tiny().eval().requires_grad_(False)
    torch.nn.init.normal_(tiny.down.weight)
    return tiny


@pytest.fixture
def layers(model: Tiny) -> AdapterLayers:
    found = AdapterLayers(model)
    with found.probing(), found.batch([(4, None)]):
        model(torch.arange(4)[None])
    return found


def adapter(name: str, *, seed: int) -> LoadedAdapter:
    generator = torch.Generator().manual_seed(seed)

    def pair(inputs: int, outputs: int) -> Pair:
        return Pair(torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator))

    pairs = {"up": pair(WIDTH, 2 * WIDTH), "down": pair(2 * WIDTH, WIDTH)}
    return LoadedAdapter(adapter_id=name, digest=name, pairs=pairs)


def merged(model: Tiny, added: LoadedAdapter | None) -> Tiny:
    """Return a copy whose weights hold the adapter, without hooks."""
    plain = Tiny().eval().requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    if added is not None:
        plain.up.weight += added.pairs["up"].up @ added.pairs["up"].down
        plain.down.weight += (added.pairs["down"].up @ added.pairs["down"].down).T
    return plain


ONE, TWO = adapter("one", seed=1), adapter("two", seed=2)


def test_what_can_be_changed_is_what_sees_every_token(layers: AdapterLayers) -> None:
    assert [(t.name, t.inputs, t.outputs) for t in layers.targets()] == [
        ("up", WIDTH, 2 * WIDTH),
        ("down", 2 * WIDTH, WIDTH),
    ]
    reasons = {name: why.split()[-1] for name, why in layers.refused.items()}
    assert reasons == {
        "embed": "embedding", "norm": "layer", "some": "batch", "never": "batch", "experts": "parameter",
        "head": "head",
    }  # fmt: skip


@pytest.mark.parametrize(
    "carried",
    [
        [(3, ONE)],
        [(1, None), (1, ONE), (1, TWO), (1, None)],
        [(5, ONE), (1, TWO), (2, ONE), (4, None)],
        [(1, TWO)] * 3 + [(1, ONE)] * 3,
    ],
)
def test_each_request_is_computed_with_its_own_adapter(
    carried: Sequence[tuple[int, LoadedAdapter | None]], model: Tiny, layers: AdapterLayers
) -> None:
    total = sum(rows for rows, _ in carried)
    tokens = (torch.arange(total) * 7 % 16)[None]
    base = model(tokens)
    with layers.batch(carried):
        together = model(tokens)
    ends = list(itertools.accumulate(rows for rows, _ in carried))
    for (rows, added), end in zip(carried, ends, strict=True):
        alone = merged(model, added)(tokens)
        here = slice(end - rows, end)
        torch.testing.assert_close(together[:, here], alone[:, here])
        if added is None:  # rows of the base are not touched at all
            assert torch.equal(together[:, here], base[:, here])
        else:
            assert not torch.allclose(together[:, here], base[:, here])
    assert torch.equal(model(tokens), base)  # and nothing stays behind


def test_the_base_keeps_its_parameters_and_their_names(model: Tiny, layers: AdapterLayers) -> None:
    assert list(model.state_dict()) == list(Tiny().state_dict())
    assert type(model.up) is torch.nn.Linear


def test_a_second_instance_in_another_thread_runs_a_batch_of_its_own(model: Tiny, layers: AdapterLayers) -> None:
    tokens = torch.arange(4)[None]
    other = copy.deepcopy(model)
    inside, checked = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def run() -> None:
        with layers.batch([(4, TWO)]):
            inside.set()
            checked.wait(60)
            results.append(other(tokens))

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(60)
    with layers.batch([(4, ONE)]):
        mine = model(tokens)
    checked.set()
    thread.join(60)
    torch.testing.assert_close(mine[:, :1], merged(model, ONE)(tokens)[:, :1])
    torch.testing.assert_close(results[0][:, :1], merged(model, TWO)(tokens)[:, :1])


def test_a_request_that_starts_anew_takes_its_adapter_along() -> None:
    assert copy.deepcopy({"adapter": ONE})["adapter"] is ONE
