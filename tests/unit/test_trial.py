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
    check_output(trial, vocabulary=264, tokens=4)
    assert torch.equal(_logits(model), before)
    for name, tensor in trial.state_dict().items():
        assert tensor.data_ptr() == (wanted[name].data_ptr() if name in wanted else places[name]), name


def test_finite_weights_whose_output_is_not_finite_are_refused(tmp_path: Path) -> None:
    import torch

    from modelswap_engine.backends.embedded.trial import check_output, trial_of
    from tests.support.models import tiny_llama

    model = _built(tiny_llama(tmp_path / "half", dtype="float16"))
    check_output(model, vocabulary=264, tokens=4)
    name = "model.layers.1.mlp.down_proj.weight"
    large = torch.full_like(model.state_dict()[name], 60000.0)
    assert torch.isfinite(large).all()
    with pytest.raises(ChecksFailed, match="not finite"):
        check_output(trial_of(model, {name: large}), vocabulary=264, tokens=4)
    check_output(model, vocabulary=264, tokens=4)


def test_what_runs_in_other_threads_is_not_copied(tmp_path: Path) -> None:
    from modelswap_engine.backends.embedded.trial import trial_of
    from tests.support.models import tiny_llama

    model = _built(tiny_llama(tmp_path / "model"))
    model._cached_continuous_batching_manager = threading.Lock()  # which cannot be copied, like a generation loop
    assert trial_of(model, {})._cached_continuous_batching_manager is None


def test_a_copy_is_taken_as_between_two_steps_though_one_is_running(tmp_path: Path) -> None:
    import copy

    import torch

    from modelswap_engine.backends.embedded.trial import trial_of
    from tests.support.models import tiny_llama

    model = _built(tiny_llama(tmp_path / "model"))
    before, still = _logits(model), copy.deepcopy(model.config)
    # What a step of the generation loop sets, and what no copy could be made of while it changes.
    model.config.is_causal, model.config.busy = False, threading.Lock()
    assert not torch.equal(_logits(model), before)
    trial = trial_of(model, {}, config=still)
    assert torch.equal(_logits(trial), before)
    assert {id(part.config) for part in trial.modules() if hasattr(part, "config")} == {id(trial.config)}
    assert trial.config is not still


def test_prompts_are_compared_by_how_likely_the_live_answer_is(tmp_path: Path) -> None:
    import torch

    from modelswap_engine.backends.embedded.trial import check_prompt, trial_of
    from modelswap_engine.backends.port import PromptTrial
    from tests.support.models import tiny_llama, write_variant

    old = tiny_llama(tmp_path / "old")
    new = write_variant(old, tmp_path / "new", ["model.layers.1.mlp.up_proj.weight"], seed=1)
    live, wanted = _built(old), _built(new)
    prompt = tuple(range(10, 30))
    answered = list(prompt)
    for _ in range(8):
        answered.append(int(live(input_ids=torch.tensor([answered])).logits[0, -1].argmax()))
    with torch.inference_mode():
        both = [
            torch.log_softmax(model(input_ids=torch.tensor([answered])).logits[0, :-1], -1) for model in (live, wanted)
        ]
    means = [float(table[range(19, 27), answered[20:]].mean()) for table in both]
    change = abs(means[0] - means[1])
    assert change > 0.01
    trial = trial_of(live, wanted.state_dict())
    check_prompt(trial, live, PromptTrial(prompt=prompt, max_logprob_delta=change * 1.01), number=1, longest=100)
    check_prompt(trial, live, PromptTrial(prompt=prompt), number=1, longest=100)
    with pytest.raises(ChecksFailed, match="number 2") as failed:
        check_prompt(trial, live, PromptTrial(prompt=prompt, max_logprob_delta=change * 0.99), number=2, longest=100)
    assert float(failed.value.details["change"]) == pytest.approx(change, rel=1e-3)
    check_prompt(live, live, PromptTrial(prompt=prompt * 50, max_logprob_delta=0.0), number=1, longest=64)
