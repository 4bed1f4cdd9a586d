"""The examples for training code run: what they publish is what was trained."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from modelswap_engine.checkpoint.build import build_manifest
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE
from tests.support.cache import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "training"


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
    )


class Words(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(4) + index, "labels": torch.arange(4) + index}


def test_a_trainer_publishes_what_it_saves(tmp_path: Path) -> None:
    serve = example("transformers_callback").ServeCheckpoints(f"file://{tmp_path}/published")
    options = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(model=tiny(), args=options, train_dataset=Words(), callbacks=[serve]).train()
    digests = [build_manifest(tmp_path / "published" / f"step-{step}").digest for step in (1, 2)]
    assert digests == [build_manifest(tmp_path / "run" / f"checkpoint-{step}").digest for step in (1, 2)]
    assert digests[0] != digests[1]
    assert (tmp_path / "published" / "step-2" / MANIFEST_FILE).is_file()


def test_a_plain_loop_gives_what_it_trained(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "start")
    loop = example("plain_pytorch")

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss

    steps, published = [], set()
    for step in loop.train(model, loss_of, [torch.arange(4)[None]] * 4, every=2):
        steps.append(step)
        done = loop.publish(model.state_dict(), f"file://{tmp_path}/{step}", side_files=tmp_path / "start")
        model.save_pretrained(tmp_path / f"saved-{step}")
        assert (
            build_manifest(tmp_path / f"saved-{step}").by_name.keys()
            == build_manifest(tmp_path / str(step)).by_name.keys()
        )
        published.add(done.digest)
    assert steps == [2, 4]
    assert len(published) == 2


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_every_example_compiles(file: Path) -> None:
    compile(file.read_text(), file, "exec")
    assert file.stem not in sys.stdlib_module_names
