"""TRL's GRPO, whose saved steps are served: its trainers are transformers' Trainers, so the callback is enough.

python examples/training/trl_grpo.py CHECKPOINT s3://acme-models/chat --model-version chat --namespace llm
"""

import argparse

from datasets import Dataset
from transformers_callback import ServeCheckpoints
from trl import GRPOConfig, GRPOTrainer


def shorter_is_better(completions: list[str], **_: object) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("uri")
    parser.add_argument("--model-version", required=True)
    parser.add_argument("--namespace", required=True)
    options = parser.parse_args()
    trainer = GRPOTrainer(
        model=options.checkpoint,
        reward_funcs=shorter_is_better,
        args=GRPOConfig(output_dir="run", max_steps=100, save_steps=20, save_total_limit=2),
        train_dataset=Dataset.from_dict({"prompt": ["Say hello.", "Name a river."] * 50}),
        callbacks=[ServeCheckpoints(options.uri, model_version=options.model_version, namespace=options.namespace)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
