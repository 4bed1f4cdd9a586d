"""The response bodies of the OpenAI API, whole and in chunks; pure."""

from typing import Any

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpanBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """``tokens`` consecutive tokens made by one version, in the choice ``index``."""

    version: str
    digest: str
    tokens: int
    index: int = 0


class Extension(msgspec.Struct, frozen=True):
    """Our addition to an answer: present only when more than one version had a part in it."""

    spans: list[SpanBody]


class Body(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A completion, a chat completion, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: Usage | None = None
    modelswap: Extension | None = None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``GET /v1/models``; a LoRA adapter names the base as its ``parent``."""

    id: str
    created: int
    owned_by: str = "modelswap"
    object: str = "model"
    version: str = ""
    digest: str = ""
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/models``."""

    data: list[ModelCard]
    object: str = "list"


class Shape:
    """How the two APIs differ: the object's name and where the text stands in a choice."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self.prefix = "chatcmpl" if chat else "cmpl"
        self.whole_object = "chat.completion" if chat else "text_completion"
        self.chunk_object = "chat.completion.chunk" if chat else "text_completion"

    def whole(self, text: str, finish: str | None, *, index: int) -> dict[str, Any]:
        """Return one choice of a complete answer."""
        choice: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": None}
        if self._chat:
            return {**choice, "message": {"role": "assistant", "content": text, "refusal": None}}
        return {**choice, "text": text}

    def chunk(self, text: str, finish: str | None, *, first: bool, index: int) -> dict[str, Any]:
        """Return the one choice of a chunk; a choice's first chunk names the role in a chat."""
        choice: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": None}
        if not self._chat:
            return {**choice, "text": text}
        delta: dict[str, str] = {"role": "assistant"} if first else {}
        if text or first:
            delta["content"] = text
        return {**choice, "delta": delta}
