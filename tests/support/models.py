"""Tiny random checkpoints for tests, written the way Hugging Face lays them out.

All share one byte-level tokenizer with 264 ids, so that any text is a prompt. They are seeded: the same call writes
the same bytes. :func:`disjoint_pair` makes two versions of one model whose answers cannot be confused: whatever the
prompt, 1.0 only ever emits lower-case letters (ids below half of the vocabulary), 1.1 only upper-case ones (ids above).
"""

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 264
HALF = VOCABULARY // 2
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LOWER = "abcdefghijklmnopqrstuvwxyz"
UPPER = LOWER.upper()
DIGITS = "0123456789"
_SPECIAL = ("<|start|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|x0|>", "<|x1|>", "<|x2|>")
EOS_ID = 1
_CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Return token → id: specials first, upper-case letters last, every byte once."""
    plain = [token for token in sorted(pre_tokenizers.ByteLevel.alphabet()) if token not in UPPER]
    return {token: number for number, token in enumerate([*_SPECIAL, *plain, *UPPER])}


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer files and the chat template."""
    vocab = vocabulary()
    assert len(vocab) == VOCABULARY
    core = Tokenizer(BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[EOS_ID],
        additional_special_tokens=list(_SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(directory)


def _save(build: Callable[[], PreTrainedModel], directory: Path, *, seed: int, dtype: str, shard: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        # Larger than the usual initialisation, so that greedy answers vary with the prompt.
        spread = 0.3 if model.config.tie_word_embeddings else 1.0
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=spread if "embed" in name or "wte" in name else 0.2)
            elif "bias" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shard)
    write_tokenizer(directory)
    return directory


def tiny_llama(
    directory: Path, *, seed: int = 0, layers: int = 3, hidden: int = 64, dtype: str = "float32", shard: str = "1GB"
) -> Path:
    """Write an untied Llama with grouped-query attention; ``shard="100KB"`` makes it a sharded checkpoint."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=EOS_ID,
    )
    return _save(lambda: LlamaForCausalLM(config), directory, seed=seed, dtype=dtype, shard=shard)


def tiny_qwen2(directory: Path, *, seed: int = 0, layers: int = 2, hidden: int = 64, dtype: str = "float32") -> Path:
    """Write a Qwen2: biases on q, k and v; output head tied to the embedding."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=EOS_ID,
    )
    return _save(lambda: Qwen2ForCausalLM(config), directory, seed=seed, dtype=dtype, shard="1GB")


def tiny_gpt2(directory: Path, *, seed: int = 0, layers: int = 2, dtype: str = "float32") -> Path:
    """Write a GPT-2: learned positions, fused qkv, output head tied to the embedding."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=layers,
        n_head=4,
        n_positions=1024,
        bos_token_id=0,
        eos_token_id=EOS_ID,
    )
    return _save(lambda: GPT2LMHeadModel(config), directory, seed=seed, dtype=dtype, shard="1GB")


def tiny_mixtral(directory: Path, *, seed: int = 0, layers: int = 2, experts: int = 4, dtype: str = "float32") -> Path:
    """Write a Mixtral: the experts of a layer are many checkpoint tensors and two runtime parameters."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=EOS_ID,
    )
    return _save(lambda: MixtralForCausalLM(config), directory, seed=seed, dtype=dtype, shard="1GB")


_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
}


def tiny_qwen3(directory: Path, *, seed: int = 0, head_dim: int = 16, dtype: str = "float32") -> Path:
    """Write a Qwen3: norms on queries and keys; output head tied to the embedding."""
    config = Qwen3Config(**_SHARED, head_dim=head_dim, tie_word_embeddings=True)
    return _save(lambda: Qwen3ForCausalLM(config), directory, seed=seed, dtype=dtype, shard="1GB")


def tiny_gemma3(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a text-only Gemma 3: four norms a layer, sliding windows, scaled and tied embedding."""
    config = Gemma3TextConfig(**_SHARED, head_dim=16, sliding_window=32)
    return _save(lambda: Gemma3ForCausalLM(config), directory, seed=seed, dtype=dtype, shard="1GB")


def tiny_phi3(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a Phi-3: q, k and v are one checkpoint tensor, gate and up another."""
    config = Phi3Config(**_SHARED, pad_token_id=0)
    return _save(lambda: Phi3ForCausalLM(config), directory, seed=seed, dtype=dtype, shard="1GB")


def tiny_qwen3_moe(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a Qwen3-MoE: the experts of a layer are many checkpoint tensors and two runtime parameters."""
    config = Qwen3MoeConfig(**_SHARED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    return _save(lambda: Qwen3MoeForCausalLM(config), directory, seed=seed, dtype=dtype, shard="1GB")


def tiny_sharded_llama(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a Llama whose tensors are spread over several files."""
    return tiny_llama(directory, seed=seed, layers=2, dtype=dtype, shard="100KB")


def tiny_mixed_llama(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a Llama whose norms are stored in another precision than the rest: they are converted with a loss."""
    tiny_llama(directory, seed=seed, layers=2, dtype=dtype)
    other = torch.float32 if dtype != "float32" else torch.float64
    tensors = load_file(directory / WEIGHTS)
    noise = {name: torch.rand(tensor.shape, dtype=other) / 1000 for name, tensor in tensors.items() if "norm" in name}
    _rewrite(directory, {name: t.to(other) + noise[name] if name in noise else t for name, t in tensors.items()})
    return directory


FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": tiny_llama,
    "llama, sharded": tiny_sharded_llama,
    "llama, other norms": tiny_mixed_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "gemma3": tiny_gemma3,
    "phi3": tiny_phi3,
    "gpt2": tiny_gpt2,
    "mixtral": tiny_mixtral,
    "qwen3-moe": tiny_qwen3_moe,
}
"""One maker for each way in which checkpoint tensors become parameters."""


def reshard(base: Path, out: Path, *, shard: str) -> Path:
    """Write the same tensors spread over files in another way."""
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors", INDEX, "modelswap.manifest.json"))
    tensors = {name: tensor for file in sorted(base.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard)
    for file_name, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, out / file_name, {"format": "pt"})
    if split.is_sharded:
        (out / INDEX).write_text(json.dumps({"metadata": split.metadata, "weight_map": split.tensor_to_filename}))
    return out


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two versions of one model; see :func:`disjoint_pair`."""

    old: Path
    new: Path
    changed: tuple[str, ...]


def disjoint_pair(root: Path, *, layers: int = 3, hidden: int = 64, dtype: str = "float32", seed: int = 0) -> Pair:
    """Write ``root/v1`` and ``root/v2``; they differ in the first and last layer, the norm and the head.

    The first coordinate of the residual stream is a constant that no layer writes to, so the output head can push
    the logits of any set of tokens down by about a hundred whatever the input.
    """
    old = tiny_llama(root / "v1", seed=seed, layers=layers, hidden=hidden, dtype=dtype)
    tensors = load_file(old / WEIGHTS)
    _hold_first(tensors)
    _allow_only(tensors["lm_head.weight"], LOWER)
    _rewrite(old, tensors)
    last = f"model.layers.{layers - 1}.mlp."
    # The first layer too: it changes the keys and values of all later ones, so that a stale cache page shows.
    changed = (
        "model.layers.0.mlp.up_proj.weight",
        f"{last}down_proj.weight",
        f"{last}gate_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    )
    new = write_variant(old, root / "v2", changed, seed=seed + 1)
    fresh = load_file(new / WEIGHTS)
    fresh[f"{last}down_proj.weight"][0] = 0.0
    fresh["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    fresh["lm_head.weight"] = torch.cat([tensors["lm_head.weight"][:, :1], tensors["lm_head.weight"][:, 1:].flip(1)], 1)
    _allow_only(fresh["lm_head.weight"], UPPER)
    _rewrite(new, fresh)
    return Pair(old=old, new=new, changed=tuple(sorted(changed)))


def retrained(base: Path, out: Path, letters: str, *, seed: int) -> Path:
    """Write another version of :func:`disjoint_pair`'s with every tensor changed, which only ever emits ``letters``."""
    tensors = load_file(base / WEIGHTS)
    head, matrices = "lm_head.weight", {name for name, tensor in tensors.items() if tensor.dim() > 1}
    fresh = load_file(write_variant(base, out, matrices - {head}, seed=seed) / WEIGHTS)
    fresh |= {name: tensor * 1.25 for name, tensor in tensors.items() if name not in matrices}
    fresh[head] = torch.cat([tensors[head][:, :1], tensors[head][:, 1:].roll(1, 1)], 1)
    _hold_first(fresh)
    _allow_only(fresh[head], letters)
    _rewrite(out, fresh)
    return out


def _hold_first(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"][:, 0] = 2.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0


def _allow_only(head: torch.Tensor, letters: str) -> None:
    vocab = vocabulary()
    head[:, 0] = -2000.0
    head[[vocab[letter] for letter in letters], 0] = 0.0


def _rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS, {"format": "pt"})


def write_variant(base: Path, out: Path, names: Iterable[str], *, seed: int) -> Path:
    """Copy a checkpoint and give the named tensors new random values of the same scale."""
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("modelswap.manifest.json"))
    wanted = set(names)
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(out.glob("*.safetensors")):
        tensors = load_file(file)
        for name in sorted(wanted & tensors.keys()):
            old = tensors[name]
            noise = torch.randn(old.shape, generator=generator) * (old.float().std(correction=0) + 0.05)
            tensors[name] = noise.to(old.dtype)
            wanted.remove(name)
        save_file(tensors, file, {"format": "pt"})
    if wanted:
        raise KeyError(f"not in {base}: {sorted(wanted)}")
    return out


def narrow(base: Path, out: Path, *, kind: str) -> Path:
    """Copy a checkpoint with its linear weights stored as eight-bit floats."""
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("modelswap.manifest.json"))
    tensors = load_file(out / WEIGHTS)
    dtype = getattr(torch, kind)
    _rewrite(out, {name: tensor.to(dtype) if "proj" in name else tensor for name, tensor in tensors.items()})
    return out


def write_both_tied(base: Path, out: Path) -> Path:
    """Copy a checkpoint with a tied head, and write the head beside the embedding too, as some tools do."""
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("modelswap.manifest.json"))
    tensors = load_file(out / WEIGHTS)
    _rewrite(out, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    return out


def edit_tensor(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Rewrite one tensor of a checkpoint as ``change`` returns it (a NaN, another shape or dtype)."""
    file = tensor_file(directory, name)
    tensors = load_file(file)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file, {"format": "pt"})
    return directory


def drop_tensor(directory: Path, name: str) -> Path:
    """Rewrite a checkpoint without one of its tensors."""
    file = tensor_file(directory, name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    return directory


def tensor_file(directory: Path, name: str) -> Path:
    """Return the safetensors file that holds a tensor."""
    if (directory / INDEX).exists():
        return directory / str(json.loads((directory / INDEX).read_text())["weight_map"][name])
    return directory / WEIGHTS


def flip_byte(directory: Path, name: str, *, position: int = 0) -> Path:
    """Flip one bit of a tensor's bytes in place, leaving the file's header and size as they are."""
    file = tensor_file(directory, name)
    with file.open("r+b") as handle:
        length = struct.unpack("<Q", handle.read(8))[0]
        begin = json.loads(handle.read(length))[name]["data_offsets"][0]
        where = 8 + length + begin + position
        handle.seek(where)
        value = handle.read(1)[0]
        handle.seek(where)
        handle.write(bytes([value ^ 0x01]))
    return directory


def expert_gates(directory: Path) -> list[str]:
    """Return the gates of all experts of a checkpoint, which one runtime parameter is made of."""
    ends = (".w1.weight", ".gate_proj.weight")
    return [name for name in tensor_names(directory) if ".experts." in name and name.endswith(ends)]


def tensor_names(directory: Path) -> list[str]:
    """Return the names of all tensors of a checkpoint, sorted."""
    names: list[str] = []
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as handle:
            length = struct.unpack("<Q", handle.read(8))[0]
            names += [name for name in json.loads(handle.read(length)) if name != "__metadata__"]
    return sorted(names)


def greedy(folder: Path, prompts: Iterable[str], *, tokens: int) -> list[list[int]]:
    """Return what transformers makes of a checkpoint, in float32 and past any end of text."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(whole[0, ids.shape[1] :].tolist())
    return found


def mean_logprob(folder: Path, prompt: str, answer: list[int]) -> float:
    """Return what transformers makes of a checkpoint: the mean log-probability per token of an answer, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(prompt).input_ids
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
    found = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])
    return float(found.mean())


def overflowing(base: Path, out: Path) -> Path:
    """Write a version whose values are all finite, and whose output is not: its last norm leaves no room."""
    shutil.copytree(base, out)
    return edit_tensor(out, "model.norm.weight", lambda tensor: tensor.fill_(3e38))


BAD_KINDS = ("shape", "nan", "part", "foreign")


def bad_checkpoint(base: Path, out: Path, kind: str) -> Path:
    """Write a version that a base of :func:`tiny_llama` cannot become, one of ``BAD_KINDS``.

    "part" is a good one of which one tensor of a fused group differs: bad is what is asked of it.
    """
    name = "model.layers.1.self_attn.o_proj.weight"
    bad = write_variant(base, out / "bad", [name, "model.layers.1.self_attn.q_proj.weight"], seed=3)
    if kind == "shape":
        edit_tensor(bad, name, lambda tensor: tensor[:, :64])
    if kind == "nan":
        edit_tensor(bad, name, lambda tensor: torch.full_like(tensor, float("nan")))
    return tiny_llama(out / "deeper", seed=3, layers=4, hidden=128) if kind == "foreign" else bad
