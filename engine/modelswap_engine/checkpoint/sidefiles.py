"""What a change of side files means for a running engine: ignored, applied with the swap, or refused.

A version is more than tensors. Each difference between two versions' side files is looked up in the lists of the
backend kind, and what is on no list is refused: nothing is ever silently ignored. The lists are data; the only code is
the comparison. Pure: callers bring the bytes of both versions.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from modelswap_engine.checkpoint.canonical import CONFIG, GENERATION, SIDE_FILES, TOKENIZER_CONFIG, meaning
from modelswap_engine.protocol.errors import IncompatibleModel, Refused, UnsupportedChange


class Verdict(StrEnum):
    """What the engine does about a difference."""

    IGNORED = "ignored"
    APPLIED = "applied"
    REFUSED = "refused"


class Rule(msgspec.Struct, frozen=True):
    """What holds for the keys of a file that match a glob; the first matching rule of a file decides.

    ``interrupts``: requests begun before the change cannot go on after it (other tokens, other end of text).
    ``model``: the key describes the model itself, so a refusal is an :class:`IncompatibleModel`.
    """

    keys: tuple[str, ...]
    verdict: Verdict
    reason: str
    interrupts: bool = False
    model: bool = False


class SideChange(msgspec.Struct, frozen=True, kw_only=True):
    """One difference; ``key`` is a dotted path, or "" for a file that is compared as a whole."""

    file: str
    key: str
    verdict: Verdict
    reason: str
    interrupts: bool = False
    model: bool = False


Rules = Mapping[str, tuple[Rule, ...]]

_BUILT_IN = "the embedded engine reads it only when it builds the model"
_TOKENS = Rule(("*",), Verdict.APPLIED, "tokenizer", interrupts=True)
_IMAGES = Rule(("*",), Verdict.REFUSED, "the embedded engine serves text only")

EMBEDDED: Final[Rules] = {
    CONFIG: (
        Rule(("eos_token_id",), Verdict.APPLIED, "end of text", interrupts=True),
        Rule(("bos_token_id", "pad_token_id"), Verdict.APPLIED, "generation default"),
        Rule(
            ("initializer_range", "*dropout*", "*_pdrop", "use_cache", "pretraining_tp", "problem_type", "id2label*"),
            Verdict.IGNORED,
            "has no effect on inference",
        ),
        Rule(
            ("label2id*", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "auto_map*"),
            Verdict.IGNORED,
            "has no effect on generated text",
        ),
        Rule(
            ("rope_*", "*max_position_embeddings", "partial_rotary_factor", "rms_norm_eps", "layer_norm_eps*", "norm_eps"),
            Verdict.REFUSED,
            _BUILT_IN,
        ),
        Rule(
            ("architectures", "model_type", "hidden_size", "intermediate_size", "vocab_size", "num_*", "n_*", "head_dim"),
            Verdict.REFUSED,
            "it describes another model",
            model=True,
        ),
        Rule(
            ("quantization_config*", "dtype", "torch_dtype", "tie_word_embeddings", "hidden_act", "*_bias", "layer_types"),
            Verdict.REFUSED,
            "it describes another model",
            model=True,
        ),
        Rule(("*",), Verdict.REFUSED, _BUILT_IN),
    ),
    GENERATION: (
        Rule(("eos_token_id",), Verdict.APPLIED, "end of text", interrupts=True),
        Rule(
            ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "max_length", "bos_token_id", "pad_token_id"),
            Verdict.APPLIED,
            "generation default",
        ),
        Rule(("output_*", "return_dict_in_generate", "use_cache"), Verdict.IGNORED, "has no effect on generated text"),
        Rule(("*",), Verdict.REFUSED, "the embedded engine does not honour this generation setting"),
    ),
    TOKENIZER_CONFIG: (
        Rule(("chat_template*",), Verdict.APPLIED, "chat template", interrupts=True),
        Rule(("auto_map*",), Verdict.IGNORED, "code from a checkpoint is never loaded"),
        _TOKENS,
    ),
    "chat_template.jinja": (Rule(("*",), Verdict.APPLIED, "chat template", interrupts=True),),
    "chat_template.json": (Rule(("*",), Verdict.APPLIED, "chat template", interrupts=True),),
    "preprocessor_config.json": (_IMAGES,),
    "processor_config.json": (_IMAGES,),
    "video_preprocessor_config.json": (_IMAGES,),
} | {
    name: (_TOKENS,)
    for name in (
        "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
        "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
    )
}  # fmt: skip
"""Lists of the embedded transformers engine. Rope and norm settings are baked into its modules when it starts."""

RULES: Final[Mapping[str, Rules]] = {"embedded": EMBEDDED}

_BY_KEY: Final = frozenset({CONFIG, GENERATION, TOKENIZER_CONFIG})
_ADVICE: Final = "serve this version by a cold restart: set it in the pods' template and restart them"
_NO_RULE: Final = Rule(("*",), Verdict.REFUSED, "this engine has no rule for the file")


def compare_side_files(
    live: Mapping[str, bytes], target: Mapping[str, bytes], *, kind: str = "embedded"
) -> tuple[SideChange, ...]:
    """Return every difference of meaning between two versions' side files, with the verdict of a backend kind.

    Args:
        live: name → bytes of the version that is being served.
        target: name → bytes of the wanted one.
        kind: ``Capabilities.kind`` of the engine.

    Raises:
        InvalidCheckpoint: a JSON file is not valid JSON.
    """
    rules = RULES[kind]
    changes = []
    for name in sorted(SIDE_FILES & (live.keys() | target.keys())):
        for key in _changed_keys(name, live.get(name), target.get(name)):
            changes.append(_judge(name, key, rules))
    return tuple(changes)


def refusals(changes: Iterable[SideChange], *, continues_requests: bool) -> tuple[Refused, ...]:
    """Return why a swap with these changes must be refused; empty when it may go ahead.

    Args:
        changes: what :func:`compare_side_files` found.
        continues_requests: the traffic mode lets requests in flight go on on the new version (Recompute, Freeze).
    """
    found: list[Refused] = []
    for change in changes:
        where = f"{change.file}: {change.key}" if change.key else change.file
        details = {"file": change.file, "key": change.key}
        if change.verdict is Verdict.REFUSED:
            error = IncompatibleModel if change.model else UnsupportedChange
            found.append(error(f"{where} changed: {change.reason}", advice=_ADVICE, details=details))
        elif change.interrupts and continues_requests:
            message = f"{where} changed ({change.reason}): requests in flight cannot continue on it"
            found.append(UnsupportedChange(message, advice="use traffic mode Drain", details=details))
    return tuple(found)


def _changed_keys(name: str, live: bytes | None, target: bytes | None) -> list[str]:
    if live == target:
        return []
    if name in _BY_KEY:
        old = _flat(meaning(name, live) if live is not None else {})
        new = _flat(meaning(name, target) if target is not None else {})
        return sorted(key for key in old.keys() | new.keys() if old.get(key, _ABSENT) != new.get(key, _ABSENT))
    if name.endswith(".json") and live is not None and target is not None:
        return [] if meaning(name, live) == meaning(name, target) else [""]
    return [""]


_ABSENT: Final = object()


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return found


def _judge(name: str, key: str, rules: Rules) -> SideChange:
    plain = key.removeprefix("text_config.") if name == CONFIG else key
    rule = next(
        (rule for rule in rules.get(name, ()) if any(fnmatch.fnmatchcase(plain, glob) for glob in rule.keys)),
        _NO_RULE,
    )
    return SideChange(
        file=name,
        key=key,
        verdict=rule.verdict,
        reason=rule.reason,
        interrupts=rule.interrupts,
        model=rule.model,
    )
