"""A plain PyTorch loop that ships its weights to running pods every few steps, and says how long each round trip took.

python examples/training/plain_pytorch.py CHECKPOINT s3://acme-models/chat --model-version chat --namespace llm
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from modelswap.publish import Bumped, Published, bump, publish, wait_until_served


def train(
    model: torch.nn.Module,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    batches: Iterable[torch.Tensor],
    *,
    every: int,
) -> Iterator[int]:
    """Train, and give the step back whenever its weights are to be shipped."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    for step, batch in enumerate(batches, start=1):
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            yield step


def ship(
    weights: Mapping[str, torch.Tensor], uri: str, *, label: str, base: str, side_files: Path, slot: str, namespace: str
) -> Published:
    """Publish what is new since ``base``, have it served, and print what each part of the way took."""
    started = time.monotonic()
    done = publish(weights, uri, version=label, base=base, side_files=side_files)
    published = time.monotonic()
    bumped: Bumped = bump(model_version=slot, namespace=namespace, version=label, uri=done.uri, digest=done.digest)
    served = wait_until_served(bumped, timeout=600)
    print(
        f"{label}: {done.changed_tensors} tensors, {done.bytes_sent / 1e6:.1f} MB sent in {published - started:.2f} s, "
        f"served by {served.pods} pods {served.seconds:.2f} s later"
    )
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("uri")
    parser.add_argument("--base", default="", help="what the pods serve now, where it was published")
    parser.add_argument("--model-version", required=True)
    parser.add_argument("--namespace", required=True)
    options = parser.parse_args()

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "self_attn" in name  # so that little travels

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss

    batches = (torch.randint(0, model.config.vocab_size, (2, 64)) for _ in range(100))
    base = options.base
    for step in train(model, loss_of, batches, every=20):
        base = ship(
            model.state_dict(),
            options.uri,
            label=f"step-{step}",
            base=base,
            side_files=options.checkpoint,
            slot=options.model_version,
            namespace=options.namespace,
        ).uri


if __name__ == "__main__":
    main()
