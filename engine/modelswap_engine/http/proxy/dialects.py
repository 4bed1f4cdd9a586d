"""What of an engine's API is let through, and where its requests name models and keep caches apart. Data, no I/O.

Engines have their admin routes on the same port. So this is a list of what is allowed; whatever is not on it does not
exist from outside, and neither does a field by which a client could reach around the gate: another adapter than the one
that its model name leads to, a session that outlives its request, code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final


class Naming(Enum):
    """How a request says which model it wants."""

    MODEL = auto()  # the field "model": the base, or an adapter
    ADAPTER = auto()  # the field "lora_path": an adapter; without it the base


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route that computes something with the live weights, asked by POST with a JSON object.

    Attributes:
        path: of the engine, and ours.
        naming: how its requests say which model they want.
        optional: a request may leave the model out; that is the base.
        salted: its requests have the field that keeps cached prefixes apart.
        generates: it answers with text, maybe in a stream of events.
    """

    path: str
    naming: Naming = Naming.MODEL
    optional: bool = False
    salted: bool = True
    generates: bool = True


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One engine's API.

    Attributes:
        name: of the engine.
        routes: all that are let through.
        salt: the request field that keeps cached prefixes apart.
        prefixed: adapters are named together with their base, ``base:adapter``.
        refused: fields that no request may have, and why; null and false are as if they were not there.
    """

    name: str
    routes: tuple[Route, ...]
    salt: str
    prefixed: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)


_LATER: Final = "its answer would be computed after the request has ended"

VLLM: Final = Dialect(
    name="vllm",
    salt="cache_salt",
    routes=(
        Route(path="/v1/completions", optional=True),
        Route(path="/v1/chat/completions", optional=True),
        Route(path="/v1/responses", optional=True),
        Route(path="/v1/messages", salted=False),
        Route(path="/v1/messages/count_tokens", salted=False, generates=False),
        Route(path="/tokenize", optional=True, salted=False, generates=False),
        Route(path="/detokenize", optional=True, salted=False, generates=False),
    ),
    refused={
        "background": _LATER,
        "kv_transfer_params": "cached keys and values are not exchanged with other engines here",
    },
)

SGLANG: Final = Dialect(
    name="sglang",
    salt="extra_key",
    prefixed=True,
    routes=(
        Route(path="/v1/completions", optional=True),
        Route(path="/v1/chat/completions", optional=True),
        Route(path="/generate", naming=Naming.ADAPTER, optional=True),
        Route(path="/v1/messages", salted=False),
        Route(path="/v1/messages/count_tokens", salted=False, generates=False),
        Route(path="/v1/tokenize", optional=True, salted=False, generates=False),
        Route(path="/v1/detokenize", optional=True, salted=False, generates=False),
    ),
    refused={
        "background": _LATER,
        "session_id": "a session would outlive its request",
        "session_params": "a session would outlive its request",
        "custom_logit_processor": "it is code",
        "lora_id": "an adapter is asked for by its name",
        "bootstrap_host": "cached keys and values are not exchanged with other engines here",
        "bootstrap_port": "cached keys and values are not exchanged with other engines here",
        "bootstrap_room": "cached keys and values are not exchanged with other engines here",
    },
)

DIALECTS: Final[Mapping[str, Dialect]] = {dialect.name: dialect for dialect in (VLLM, SGLANG)}
