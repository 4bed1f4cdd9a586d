"""Staged weights are run before anybody is answered from them, beside a model that goes on with its own."""

import threading
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.protocol.errors import ChecksFailed

pytestmark = pytest.mark.model

_FAMILIES = (
    "llama", "llama, sharded", "llama, other norms", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "mixtral", "qwen3-moe",
)  # fmt: skip


def _built(directory: Path) -> Any:
    from modelswap_engine.backends.embedded import loading
    from modelswap_engine.weights.pace import Pace
    from tests.support.orders import ranges

    return loading.build_model(str(directory), ranges(directory), pace=Pace())


def _logits(model: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.arange(20)[None], use_cache=False).logits


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_trial_is_the_version_and_the_model_stays_what_it_is(tmp_path: Path, family: str) -> None:
    import torch

    from modelswap_engine.backends.embedded.trial import check_output, trial_of
    from tests.support.models import FAMILIES, tensor_names, write_variant

    assert tuple(FAMILIES) == _FAMILIES
    old = FAMILIES[family](tmp_path / "old")
    new = write_variant(old, tmp_path / "new", tensor_names(old)[::3], seed=1)
    model, fresh = _built(old), _built(new)
    before = _logits(model)
    held = fresh.state_dict()
    wanted = {name: tensor for name, tensor in held.items() if not torch.equal(tensor, model.state_dict()[name])}
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    trial = trial_of(model, wanted)
    assert torch.equal(_logits(trial), _logits(fresh))
    assert not torch.equal(_logits(trial), before)
    check_output(trial, vocabulary=264)
    assert torch.equal(_logits(model), before)
    for name, tensor in trial.state_dict().items():
        assert tensor.data_ptr() == (wanted[name].data_ptr() if name in wanted else places[name]), name


def test_finite_weights_whose_output_is_not_finite_are_refused(tmp_path: Path) -> None:
    import torch

    from modelswap_engine.backends.embedded.trial import check_output, trial_of
    from tests.support.models import tiny_llama

    model = _built(tiny_llama(tmp_path / "half", dtype="float16"))
    check_output(model, vocabulary=264)
    name = "model.layers.1.mlp.down_proj.weight"
    large = torch.full_like(model.state_dict()[name], 60000.0)
    assert torch.isfinite(large).all()
    with pytest.raises(ChecksFailed, match="not finite"):
        check_output(trial_of(model, {name: large}), vocabulary=264)
    check_output(model, vocabulary=264)


def test_what_runs_in_other_threads_is_not_copied(tmp_path: Path) -> None:
    from modelswap_engine.backends.embedded.trial import trial_of
    from tests.support.models import tiny_llama

    model = _built(tiny_llama(tmp_path / "model"))
    model._cached_continuous_batching_manager = threading.Lock()  # which cannot be copied, like a generation loop
    assert trial_of(model, {})._cached_continuous_batching_manager is None
