"""A callback for transformers' Trainer (and TRL's, which are Trainers): each checkpoint that is saved is served.

Trainer(..., callbacks=[ServeCheckpoints("s3://acme-models/chat", model_version="chat", namespace="llm")])
"""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from modelswap.publish import bump, publish, wait_until_served


class ServeCheckpoints(TrainerCallback):
    """Publishes checkpoints as the Trainer saves them, so that names and tied weights are those of its files.

    Args:
        uri: folder that versions are published below.
        model_version: the ModelVersion that serves them; None only publishes.
        namespace: its namespace.
        base: URI of a published version, such as the one that was trained on: what did not change does not travel.
        timeout: seconds that a version may take until it is served.
    """

    def __init__(
        self, uri: str, *, model_version: str | None = None, namespace: str = "", base: str = "", timeout: float = 600
    ) -> None:
        self.uri, self.base, self.timeout = uri, base, timeout
        self.model_version, self.namespace = model_version, namespace
        self.published: Path | None = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Publish the checkpoint that was just written; training waits until it is served."""
        if not state.is_world_process_zero:
            return
        label = f"step-{state.global_step}"
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # What was published last may lie here still: what a pack is made from is then not fetched again.
        copy = self.published if self.published is not None and self.published.is_dir() else None
        done = publish(folder, self.uri, version=label, base=self.base, base_folder=copy)
        if not self.uri.startswith("file:"):
            self.base, self.published = done.uri, folder
        if self.model_version is not None:
            bumped = bump(
                model_version=self.model_version,
                namespace=self.namespace,
                version=label,
                uri=done.uri,
                digest=done.digest,
            )
            wait_until_served(bumped, timeout=self.timeout)
