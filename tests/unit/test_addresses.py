"""Who holds addresses of weights is seen, and gets new values in the old place."""

from typing import Any

import pytest

pytestmark = pytest.mark.model


def _network() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2)).requires_grad_(False)


def test_compiled_parts_are_seen_wherever_they_are() -> None:
    import torch

    from modelswap_engine.weights.addresses import compiled

    assert not compiled(_network())
    inside = _network()
    inside[2].compile()
    assert compiled(inside)
    wrapped = torch.nn.ModuleList([torch.compile(_network())])
    assert compiled(wrapped)
    replaced = _network()
    replaced[0].forward = torch.compile(replaced[0].forward)
    assert compiled(replaced)


@pytest.mark.full
def test_code_that_was_really_compiled_computes_with_what_was_copied() -> None:
    import torch

    from modelswap_engine.weights.live import LiveTable
    from modelswap_engine.weights.proof import Known
    from modelswap_engine.weights.version import Method, Staged, Version, plan_change

    network, values = _network(), torch.randn(3, 4)
    run = torch.compile(network)
    before = run(values)
    wanted = {name: torch.randn_like(tensor) for name, tensor in network.state_dict().items()}
    staged = Staged("op", Version("new", wanted, Known({})), keep_previous=True)
    change = plan_change(LiveTable(network), staged, method=Method.COPY, digest="old", known=Known({}), older=None)
    change.apply(change.forward)
    fresh = _network()
    fresh.load_state_dict(wanted)
    torch.testing.assert_close(run(values), fresh(values))
    change.apply(change.backward)
    torch.testing.assert_close(run(values), before)
