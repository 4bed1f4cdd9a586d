"""The request bodies of the OpenAI API, and what of them is not done here.

What a client asks for and this server cannot do is refused by name; only fields that ask for nothing (their
neutral values) pass. Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from modelswap_engine.http.openai.errors import InvalidValue, UnsupportedParameter
from modelswap_engine.protocol.codec import decode


class StreamOptions(msgspec.Struct):
    """``include_usage`` asks for a last chunk with the token counts."""

    include_usage: bool = False


class _Common(msgspec.Struct, kw_only=True):
    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False


class CompletionRequest(_Common, kw_only=True):
    """``POST /v1/completions``; a prompt is text or token ids."""

    prompt: str | list[Any]


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None


class ChatRequest(_Common, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}


MAX_CHOICES: Final = 16

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
"""Fields that are not supported, with the values that ask for nothing (None always does)."""

_RESERVED_TEMPLATE_NAMES: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def refuse_unsupported(body: bytes) -> None:
    """Check the raw body for fields that this server does not do.

    Raises:
        UnsupportedParameter: names the field.
        BadRequest: not a JSON object.
    """
    fields = decode(body, dict[str, Any])
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(value == item for item in neutral):
            raise UnsupportedParameter.of(name)


def number_of_choices(request: _Common) -> int:
    """Return how many answers are wanted.

    Raises:
        InvalidValue: none, or too many.
    """
    wanted = 1 if request.n is None else request.n
    if not 1 <= wanted <= MAX_CHOICES:
        raise InvalidValue.of("n", f"{wanted} is not between 1 and {MAX_CHOICES}")
    return wanted


def stop_strings(request: _Common) -> tuple[str, ...]:
    """Return the stop strings.

    Raises:
        InvalidValue: more than four, empty or very long ones.
    """
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > 4:
        raise InvalidValue.of("stop", f"{len(stops)} strings given, at most 4 are accepted")
    if any(not stop or len(stop) > 1000 for stop in stops):
        raise InvalidValue.of("stop", "strings must have 1 to 1000 characters")
    return tuple(stops)


def prompt_of(request: CompletionRequest) -> str | tuple[int, ...]:
    """Return the one prompt, text or token ids.

    Raises:
        UnsupportedParameter: several prompts.
        InvalidValue: neither text nor ids.
    """
    prompt: object = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(item) is int and item >= 0 for item in prompt):
        return tuple(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt):
        raise UnsupportedParameter.of("prompt", "with several prompts is not supported")
    raise InvalidValue.of("prompt", "must be a non-empty text or a non-empty list of token ids")


def conversation_of(request: ChatRequest) -> list[dict[str, str]]:
    """Return the messages as plain text turns.

    Raises:
        InvalidValue: none, or a part without text.
        UnsupportedParameter: parts that are not text.
    """
    if not request.messages:
        raise InvalidValue.of("messages", "must not be empty")
    return [_turn(index, message) for index, message in enumerate(request.messages)]


def _turn(index: int, message: ChatMessage) -> dict[str, str]:
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text":
                problem = f"of type {part.type[:50]!r} is not supported"
                raise UnsupportedParameter.of(f"messages[{index}].content", problem)
            if part.text is None:
                raise InvalidValue.of(f"messages[{index}].content", "a text part has no text")
        content = "".join(part.text or "" for part in content)
    turn = {"role": message.role, "content": content or ""}
    return turn if message.name is None else {**turn, "name": message.name}


def template_options(request: ChatRequest) -> dict[str, Any]:
    """Return the extra values for the chat template.

    Raises:
        InvalidValue: one of them would replace what the server itself provides.
    """
    clash = _RESERVED_TEMPLATE_NAMES & request.chat_template_kwargs.keys()
    if clash:
        raise InvalidValue.of("chat_template_kwargs", f"may not set {', '.join(sorted(clash))}")
    return request.chat_template_kwargs
