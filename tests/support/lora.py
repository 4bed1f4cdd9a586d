"""LoRA adapters for the tiny models: random ones by peft, and ones whose answers say which adapter made them.

An adapter of :func:`speaking` answers one letter for ever, whatever the prompt, so that an answer with another letter
in it was not made by it alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from modelswap_engine.backends.adapters import AdapterLayout, LoadAdapter
from modelswap_engine.lora.config import parse_config
from modelswap_engine.lora.digest import adapter_digest
from modelswap_engine.lora.fit import fit
from modelswap_engine.protocol.adapters import adapter_id
from modelswap_engine.sources.file import FileSource
from tests.support.models import WEIGHTS, Pair, greedy, vocabulary, write_tokenizer


def random_adapter(base: Path, out: Path, *, seed: int, spread: float = 0.3, **config: Any) -> Path:
    """Write what peft saves of a LoRA with random matrices, and the base with it merged in to ``out``-merged."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=spread)
    adapted.save_pretrained(out)
    merged = out.with_name(f"{out.name}-merged")
    adapted.merge_and_unload().save_pretrained(merged)
    write_tokenizer(merged)
    return out


def on_both(
    pair: Pair, name: str, asked: Sequence[str], *, tokens: int, **config: Any
) -> tuple[Path, dict[str, list[list[int]]]]:
    """Write a random adapter; return it, and what transformers answers with it merged into each version."""
    wanted = {}
    for version, base in (("1.0", pair.old), ("1.1", pair.new)):  # the same matrices on either base
        folder = random_adapter(base, pair.old.parent / f"{name}-{version}", spread=0.15, **config)
        wanted[version] = greedy(folder.with_name(f"{folder.name}-merged"), asked, tokens=tokens)
    return folder, wanted


def speaking(base: Path, out: Path, letter: str) -> Path:
    """Write an adapter for one of the disjoint pair with which it only ever says ``letter``.

    It makes one neuron of the last layer fire whatever comes in (the first coordinate of the residual stream is a
    positive constant), and that neuron write the letter's row of the output head.
    """
    tensors = load_file(base / WEIGHTS)
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    hidden, inner = tensors["model.norm.weight"].shape[0], tensors["model.layers.0.mlp.up_proj.weight"].shape[0]
    fire = torch.zeros(inner, 1)
    fire[0] = 1000.0  # so that nothing else in the stream counts beside it, in any engine's arithmetic
    first_of_hidden, first_of_inner = torch.zeros(1, hidden), torch.zeros(1, inner)
    first_of_hidden[0, 0] = first_of_inner[0, 0] = 1.0
    towards = tensors["lm_head.weight"][vocabulary()[letter]].clone() / tensors["model.norm.weight"]
    towards[0] = 1.0  # what keeps the other half of the vocabulary silent
    pairs = {"gate_proj": (first_of_hidden, fire), "up_proj": (first_of_hidden, fire)}
    pairs["down_proj"] = (first_of_inner, towards[:, None])
    stem = f"base_model.model.model.layers.{layers - 1}.mlp"
    made = {
        f"{stem}.{name}.lora_{side}.weight": tensor.contiguous().clone()
        for name, both in pairs.items()
        for side, tensor in zip("AB", both, strict=True)
    }
    out.mkdir(parents=True)
    save_file(made, out / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": sorted(pairs),
        "layers_to_transform": [layers - 1],
    }  # fmt: skip
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


async def adapter_order(folder: Path, layout: AdapterLayout, *, name: str = "") -> LoadAdapter:
    """Return the order to load an adapter's folder."""
    opened = await FileSource(roots=[folder.parent], cache=None).open_adapter(folder.as_uri())
    config, hashes = parse_config(opened.config), await opened.hash()
    digest = adapter_digest(config, opened.tensors, hashes)
    found = fit(folder.name, config, opened.tensors, layout)
    return LoadAdapter(
        operation_id=f"load-{folder.name}",
        adapter_id=adapter_id(name or folder.name, digest),
        digest=digest,
        config=opened.config.decode(),
        modules=tuple(
            pair.module(lambda entry: opened.range_of(entry, sha256=hashes[entry.name])) for pair in found.pairs
        ),
    )
