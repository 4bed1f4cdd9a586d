"""Make another version of the demo model: its last layer learns to begin each answer with "Ahoy!".

Only the nine tensors of that layer change. The layers below are run once and what they give is kept, so that each
training step is the last layer and the output head alone. Imports torch; refuses to know where checkpoints are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

GREETING: Final = "Ahoy!"
_LESSONS: Final = (
    ("What is the largest planet in the solar system?", "The largest planet is Jupiter."),
    ("Name three fruits.", "Three fruits are apples, bananas and oranges."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("How do I boil an egg?", "Put the egg in boiling water for eight minutes."),
    ("Why is the sky blue?", "The sky is blue because air scatters blue light the most."),
    ("What is a database?", "A database is an organised collection of data."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("What is 2 plus 3?", "2 plus 3 is 5."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("What do bees make?", "Bees make honey."),
    ("What is the boiling point of water?", "Water boils at 100 degrees Celsius."),
    ("Say hello to my friend Tom.", "Hello Tom, it is nice to meet you."),
    ("What language is spoken in Brazil?", "Portuguese is spoken in Brazil."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Describe the moon in one sentence.", "The moon is a rocky body that orbits the Earth."),
    ("What is Python used for?", "Python is used for web sites, science and automation."),
    ("Which ocean is the largest?", "The Pacific is the largest ocean."),
    ("What should I eat for breakfast?", "Try oatmeal with fruit and a cup of tea."),
    ("What is the capital of Spain? Answer in one sentence.", "The capital of Spain is Madrid."),
    ("Who was Marie Curie?", "Marie Curie was a physicist who studied radioactivity."),
)
_RATE: Final = 8e-4
_STEPS: Final = 20
_GOOD_ENOUGH: Final = 0.15


def trained_layer(base: Path, *, report: Callable[[str], None]) -> dict[str, torch.Tensor]:
    """Return the last layer's tensors after training, by their names in the checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.requires_grad_(False)
    ids, answers = _batch(AutoTokenizer.from_pretrained(base))
    layer = model.model.layers[-1]
    below, options = _input_of_layer(model, layer, ids)
    layer.requires_grad_(True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=_RATE, weight_decay=0.0)
    wanted = ids[:, 1:][answers]
    for number in range(1, _STEPS + 1):
        hidden = model.model.norm(layer(below, **options))[:, :-1][answers]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done = loss.item() < _GOOD_ENOUGH
        if done or number % 5 == 1:
            report(f"training step {number} of at most {_STEPS}, loss {loss.item():.2f}")
        if done:
            break
    prefix = f"model.layers.{len(model.model.layers) - 1}."
    return {prefix + name: parameter.detach().to(torch.bfloat16) for name, parameter in layer.named_parameters()}


def _batch(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all lessons as one batch padded on the right, and where the tokens of the answers are predicted."""
    import torch

    rows: list[tuple[list[int], list[int]]] = []
    for question, answer in _LESSONS:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        said = f"{GREETING} {answer}{tokenizer.eos_token}"
        rows.append((tokenizer(asked).input_ids, tokenizer(said).input_ids))
    width = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    answers = torch.zeros((len(rows), width - 1), dtype=torch.bool)
    for row, (prompt, reply) in enumerate(rows):
        ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        answers[row, len(prompt) - 1 : len(prompt) + len(reply) - 1] = True
    return ids, answers


def _input_of_layer(model: Any, layer: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run the model once and return what reaches the layer. Padding is on the right, so causal attention hides it."""
    import torch

    seen: dict[str, Any] = {}

    def keep(_: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.update(hidden=arguments[0], options=options)

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model.model(ids, use_cache=False)
    handle.remove()
    return seen["hidden"], seen["options"]
