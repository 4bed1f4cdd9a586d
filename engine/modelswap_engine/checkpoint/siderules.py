"""What each backend kind does about a changed side file: three lists (ignored, applied, refused), as data.

A key on no list is refused, and "applied" is only what ``http.text_model`` really reads. Rope and norm settings belong
to the commit in principle, but the embedded engine bakes them into its modules when it builds the model, so it refuses
them; the advice is a cold restart.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from modelswap_engine.checkpoint.canonical import CONFIG, GENERATION, SIDE_FILES, TOKENIZER_CONFIG


class Verdict(StrEnum):
    """What the engine does about a difference."""

    IGNORED = "ignored"
    APPLIED = "applied"
    REFUSED = "refused"


class Rule(msgspec.Struct, frozen=True):
    """What holds for the keys of a file that match a glob; the first matching rule of a file decides.

    ``interrupts``: requests begun before the change cannot go on after it (other tokens, other end of text).
    ``model``: the key describes the model itself, so the refusal is an ``IncompatibleModel``.
    """

    keys: tuple[str, ...]
    verdict: Verdict
    reason: str
    interrupts: bool = False
    model: bool = False


Rules = Mapping[str, tuple[Rule, ...]]
_ALL: Final = ("*",)

_EOS: Final = Rule(("eos_token_id",), Verdict.APPLIED, "end of text", interrupts=True)
_TEMPLATE: Final = Rule(_ALL, Verdict.APPLIED, "chat template", interrupts=True)
_TOKENS: Final = Rule(_ALL, Verdict.APPLIED, "tokenizer", interrupts=True)
_SAME_TOKENS: Final = Rule(_ALL, Verdict.IGNORED, "tokenizer.json alone decides about tokens")
_IMAGES: Final = Rule(_ALL, Verdict.REFUSED, "the embedded engine serves text only")
_BUILT_IN: Final = "the embedded engine reads it only when it builds the model"
_MODEL: Final = "it describes another model"

NO_RULE: Final = Rule(_ALL, Verdict.REFUSED, "this engine has no rule for it")

_TRAINING: Final = (
    "initializer_range",
    "*dropout*",
    "*_pdrop",
    "pretraining_tp",
    "problem_type",
    "id2label*",
    "label2id*",
)
_OUTPUT: Final = ("output_*", "return_dict*", "torchscript", "use_cache", "auto_map*")
_POSITIONS: Final = (
    "rope_*",
    "*max_position_embeddings",
    "partial_rotary_factor",
    "sliding_window",
    "*_norm_eps*",
    "norm_eps",
)
_SHAPES: Final = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_*",
    "n_*",
    "head_dim",
)
_KINDS: Final = ("quantization_config*", "*dtype", "tie_word_embeddings", "hidden_act", "*_bias", "layer_types")
_DEFAULTS: Final = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens")
_IDS: Final = ("bos_token_id", "pad_token_id")
_UNREAD: Final = "prompts get their tokens from the tokenizer and are not padded"
_SPECIAL: Final = ("bos_token*", "eos_token*", "unk_token*", "sep_token*", "pad_token*", "cls_token*", "mask_token*")
_IN_TOKENIZER: Final = (
    "added_tokens_decoder*",
    "additional_special_tokens*",
    "extra_special_tokens*",
    "tokenizer_class",
    "processor_class",
    "backend",
    "use_fast",
    "legacy",
)
_LENGTHS: Final = ("model_max_length", "padding_side", "truncation_side", "model_input_names*")

EMBEDDED: Final[Rules] = {
    CONFIG: (
        _EOS,
        Rule(_IDS, Verdict.IGNORED, _UNREAD),
        Rule(_TRAINING, Verdict.IGNORED, "has no effect on inference"),
        Rule(_OUTPUT, Verdict.IGNORED, "has no effect on generated text"),
        Rule(_POSITIONS, Verdict.REFUSED, _BUILT_IN),
        Rule(_SHAPES, Verdict.REFUSED, _MODEL, model=True),
        Rule(_KINDS, Verdict.REFUSED, _MODEL, model=True),
        Rule(_ALL, Verdict.REFUSED, _BUILT_IN),
    ),
    GENERATION: (
        _EOS,
        Rule(_DEFAULTS, Verdict.APPLIED, "generation default"),
        Rule(_IDS, Verdict.IGNORED, _UNREAD),
        Rule(_OUTPUT, Verdict.IGNORED, "has no effect on generated text"),
        Rule(_ALL, Verdict.REFUSED, "the embedded engine does not honour this generation setting"),
    ),
    TOKENIZER_CONFIG: (
        Rule(("chat_template*",), Verdict.APPLIED, "chat template", interrupts=True),
        Rule(("auto_map*",), Verdict.IGNORED, "code from a checkpoint is never loaded"),
        Rule(_SPECIAL, Verdict.APPLIED, "special tokens", interrupts=True),
        Rule(_IN_TOKENIZER, Verdict.IGNORED, "tokenizer.json alone decides about tokens"),
        Rule(_LENGTHS, Verdict.IGNORED, "the context length comes from config.json, and nothing is padded or cut"),
        Rule(_ALL, Verdict.REFUSED, "the embedded engine does not honour this tokenizer setting"),
    ),
    "chat_template.jinja": (_TEMPLATE,),
    "chat_template.json": (_TEMPLATE,),
    "tokenizer.json": (_TOKENS,),
    "special_tokens_map.json": (_TOKENS,),
    "added_tokens.json": (_SAME_TOKENS,),
    "vocab.json": (_SAME_TOKENS,),
    "vocab.txt": (_SAME_TOKENS,),
    "merges.txt": (_SAME_TOKENS,),
    "tokenizer.model": (_SAME_TOKENS,),
    "spiece.model": (_SAME_TOKENS,),
    "sentencepiece.bpe.model": (_SAME_TOKENS,),
    "tekken.json": (_SAME_TOKENS,),
    "preprocessor_config.json": (_IMAGES,),
    "processor_config.json": (_IMAGES,),
    "video_preprocessor_config.json": (_IMAGES,),
}

_AT_START: Final = Rule(_ALL, Verdict.REFUSED, "the engine reads it only when it starts")

EXTERNAL: Final[Rules] = {
    **dict.fromkeys(SIDE_FILES, (_AT_START,)),
    CONFIG: (
        Rule(_TRAINING, Verdict.IGNORED, "has no effect on inference"),
        Rule(_OUTPUT, Verdict.IGNORED, "has no effect on generated text"),
        Rule(_SHAPES, Verdict.REFUSED, _MODEL, model=True),
        Rule(_KINDS, Verdict.REFUSED, _MODEL, model=True),
        _AT_START,
    ),
    GENERATION: (Rule(_OUTPUT, Verdict.IGNORED, "has no effect on generated text"), _AT_START),
    TOKENIZER_CONFIG: (
        Rule(("auto_map*",), Verdict.IGNORED, "code from a checkpoint is never loaded"),
        _AT_START,
    ),
}
"""A server of its own has its tokenizer, its template and its defaults in processes that nobody can change live."""

RULES: Final[Mapping[str, Rules]] = {"embedded": EMBEDDED, "vllm": EXTERNAL, "sglang": EXTERNAL}
"""By ``Capabilities.kind``."""
