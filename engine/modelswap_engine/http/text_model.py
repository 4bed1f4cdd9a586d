"""The text side of one version: tokenizer, chat template, end-of-text ids, generation defaults, context length.

Read from a folder of side files that was verified before; immutable afterwards, so a request that started with
one version keeps its own while the next version goes live. Knows files and text, no HTTP and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from modelswap_engine.http.chat_template import ChatTemplate
from modelswap_engine.protocol.errors import BadRequest, InvalidCheckpoint, UnsupportedFormat

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_FILE_BYTES: Final = 256 * 1024 * 1024
DEFAULT_CONTEXT: Final = 2048
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True)
class Defaults:
    """What ``generation_config.json`` says when the request says nothing; None means the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class TextModel:
    """Everything the data port needs to know of a version to speak with it."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos: tuple[int, ...]
    defaults: Defaults
    context_length: int

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenize a plain prompt, with the special tokens the tokenizer adds by itself."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, options: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Render and tokenize a conversation.

        Raises:
            BadRequest: the model has no chat template, or its template refuses the messages.
        """
        if self.template is None:
            raise BadRequest("this model has no chat template", advice="use /v1/completions")
        prompt = self.template.render(messages, options=options)
        return tuple(self.tokenizer.encode(prompt, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    @property
    def vocabulary(self) -> int:
        """Number of ids the tokenizer knows."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)


def load_text_model(directory: Path) -> TextModel:
    """Read a version's side files.

    Raises:
        UnsupportedFormat: there is no ``tokenizer.json``.
        InvalidCheckpoint: a file is malformed; the message names it.
    """
    config = _read_json(directory / "config.json")
    generation = _read_json(directory / "generation_config.json")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    special = _special_tokens(_read_json(directory / "special_tokens_map.json"), tokenizer_config)
    tokenizer = _load_tokenizer(directory / "tokenizer.json")
    source = _template_source(directory, tokenizer_config)
    return TextModel(
        tokenizer=tokenizer,
        template=None if source is None else ChatTemplate(source, special_tokens=special),
        eos=_eos(generation, config, tokenizer, special),
        defaults=_defaults(generation),
        context_length=_context_length(config),
    )


def _read_bytes(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidCheckpoint(f"{path.name} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidCheckpoint(f"{path.name} cannot be read: {error.strerror}") from None


def _read_json(path: Path) -> dict[str, Any]:
    data = _read_bytes(path)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path.name} is not a JSON object")
    return value


def _load_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # not at the top: a proxy makes no tokens, and its image lacks the package

    data = _read_bytes(path)
    if data is None:
        raise UnsupportedFormat(
            "the checkpoint has no tokenizer.json",
            advice="save it with a fast tokenizer: AutoTokenizer.from_pretrained(...).save_pretrained(DIR)",
        )
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for malformed input
        raise InvalidCheckpoint(f"tokenizer.json is malformed: {str(error)[:300]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template_source(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    data = _read_bytes(directory / "chat_template.jinja")
    if data is not None:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidCheckpoint("chat_template.jinja is not UTF-8 text") from None
    legacy = _read_json(directory / "chat_template.json")  # what processors wrote before there was the .jinja file
    value = legacy.get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(value, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; a later source counts more."""
    return {
        name: text
        for source in sources
        for name in _SPECIAL_NAMES
        if (text := _token_text(source.get(name))) is not None
    }


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer, special: Mapping[str, str]
) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        candidates = value if isinstance(value, list) else [value]
        ids = tuple(item for item in candidates if isinstance(item, int) and not isinstance(item, bool))
        if ids:
            return ids
    token = special.get("eos_token")
    found = None if token is None else tokenizer.token_to_id(token)
    return () if found is None else (found,)


def _number(value: object, *, low: float, high: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        return None
    return float(value)


def _defaults(generation: Mapping[str, Any]) -> Defaults:
    tokens = _number(generation.get("max_new_tokens"), low=1, high=10_000_000)
    limit = None if tokens is None else int(tokens)
    if generation.get("do_sample") is not True:  # the sampling values then mean nothing
        return Defaults(max_new_tokens=limit)
    top_k = _number(generation.get("top_k"), low=0, high=10_000_000)
    return Defaults(
        temperature=_number(generation.get("temperature"), low=0.0, high=2.0),
        top_p=_number(generation.get("top_p"), low=1e-6, high=1.0),
        top_k=None if top_k is None else int(top_k),
        max_new_tokens=limit,
    )


def _context_length(config: Mapping[str, Any]) -> int:
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _CONTEXT_KEYS:
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return DEFAULT_CONTEXT
