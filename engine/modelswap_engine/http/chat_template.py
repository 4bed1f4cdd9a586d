"""Chat templates, rendered in Jinja's sandbox.

A template is data of a checkpoint and therefore hostile: it sees plain strings, lists and dicts only, cannot
change them, cannot multiply itself into memory, and its output is bounded. The environment (trimming, ``tojson``,
``raise_exception``, ``strftime_now``, the ``generation`` tag) is the one templates on the Hub are written for.
Transformers itself is not imported: it would bring torch into the front process (half a gigabyte).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from modelswap_engine.protocol.errors import BadRequest, InvalidCheckpoint

MAX_TEMPLATE_CHARACTERS: Final = 1_000_000
MAX_OUTPUT_CHARACTERS: Final = 8_000_000
MAX_PRODUCT: Final = 1_000_000


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the shape jinja asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("chat templates may not use **")
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int) and len(one) * other > MAX_PRODUCT:
                raise jinja2.exceptions.SecurityError("a repeated value is too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    allowed: dict[str, Any] = {
        key: options[key] for key in ("ensure_ascii", "separators", "sort_keys") if key in options
    }
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **allowed})


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template with the special tokens of its tokenizer."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Raises:
            InvalidCheckpoint: too large, or not a template.
        """
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise InvalidCheckpoint(f"the chat template has {len(source)} characters, more than is accepted")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidCheckpoint(
                f"the chat template does not compile: {error}", advice="fix chat_template in the checkpoint"
            ) from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, options: Mapping[str, Any] | None = None) -> str:
        """Return the prompt for the assistant's next turn.

        Raises:
            BadRequest: the template refuses these messages, or fails on them.
        """
        values: dict[str, Any] = {**self._special_tokens, **(options or {})}
        values |= {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARACTERS:
                    raise BadRequest("the chat template produced too much text", details={"param": "messages"})
        except BadRequest:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a foreign template raises is its answer to this input
            raise BadRequest(
                f"the model's chat template refuses these messages: {str(error)[:300]}", details={"param": "messages"}
            ) from None
        return "".join(pieces)
