"""The routes of the data port.

The order within a request is the contract with the swap transaction: pass the gate, enter the update lock, acquire the
adapter, tokenize with the admitted version's own tokenizer, hand over to the engine, say so, consume. The contexts
are left in reverse, each exactly once, however the request ends.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from modelswap_engine.backends.port import Generate, Generation
from modelswap_engine.http.bodies import read_bytes
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.openai import bodies, requests
from modelswap_engine.http.openai.answer import Answer
from modelswap_engine.http.openai.exchange import Exchange, Outcome
from modelswap_engine.http.openai.names import Names
from modelswap_engine.http.openai.sampling import generate_of, several
from modelswap_engine.http.openai.text import TextStream
from modelswap_engine.http.places import Places
from modelswap_engine.http.resources import VersionResources
from modelswap_engine.http.text_model import TextModel
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.entries import Entry
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.errors import BadRequest, NotReady
from modelswap_engine.protocol.messages import VersionRef
from modelswap_engine.swap.coordinator import Coordinator

REQUIRE_HEADER = "x-modelswap-require-version"
ENCODE_SECONDS = 10.0

AnyRequest = requests.CompletionRequest | requests.ChatRequest


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Bounds of the data port.

    Attributes:
        served_model_name: the only model name requests may use.
        context_limit: tokens the engine's KV cache can hold for one request.
        write_seconds: how long one write may wait for a client that does not read.
        max_requests: requests inside at once, waiting ones too; one more is answered "overloaded".
    """

    served_model_name: str
    context_limit: int = 2**31
    write_seconds: float = 30.0
    max_requests: int = 2048


class DataPort:
    """Handlers of ``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        backend: Generation,
        resources: VersionResources,
        metrics: Metrics,
        settings: DataSettings,
        adapters: AdapterDesk | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._backend = backend
        self._resources = resources
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._places = Places(settings.max_requests)
        self._names = Names(
            settings.served_model_name, coordinator=coordinator, adapters=adapters, since=int(wall_clock())
        )

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        return [
            *self._names.routes(),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue a prompt."""
        with self._places.take():
            raw = await read_bytes(request)
            requests.refuse_unsupported(raw)
            return await self._serve(request, decode(raw, requests.CompletionRequest), bodies.Shape(chat=False))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        with self._places.take():
            raw = await read_bytes(request)
            requests.refuse_unsupported(raw)
            return await self._serve(request, decode(raw, requests.ChatRequest), bodies.Shape(chat=True))

    async def _serve(self, request: web.Request, ask: AnyRequest, shape: bodies.Shape) -> web.StreamResponse:
        self._names.require(ask.model)
        stops, number = requests.stop_strings(ask), requests.number_of_choices(ask)
        encode_prompt = _encoder(ask)
        required = request.headers.get(REQUIRE_HEADER)
        request_id = f"{shape.prefix}-{secrets.token_hex(12)}"
        with (
            self._places.take(number - 1),
            Outcome(self._metrics, clock=self._clock, on_lost=self._coordinator.worker_lost) as outcome,
        ):
            async with (
                self._coordinator.admission(require_version=required, request_id=request_id) as admission,
                self._names.adapter(ask.model) as adapter,
                AsyncExitStack() as streams,
            ):
                live = admission.live
                outcome.let_in(live)
                text = self._resources.of(live.digest)
                order = generate_of(
                    ask,
                    request_id=request_id,
                    prompt=await _bounded(encode_prompt, text),
                    text=text,
                    context_limit=self._settings.context_limit,
                    adapter=adapter.id if adapter is not None else "",
                    version=live.digest,
                )
                self._require_live(live)
                tokens = []
                for one in several(order, number):
                    tokens.append(self._backend.generate(one))
                    streams.push_async_callback(tokens[-1].aclose)
                admission.submitted()
                outcome.sent()
                answers = [
                    Answer(
                        stream,
                        text=TextStream(text.decode, stops),
                        eos=frozenset(text.eos),
                        required_digest=live.digest if required else None,
                        trusted=lambda: self._coordinator.trusted,
                    )
                    for stream in tokens
                ]
                exchange = self._exchange(
                    ask, shape=shape, order=order, answers=answers, outcome=outcome, adapter=adapter
                )
                return await (exchange.stream(request) if ask.stream else exchange.whole())

    def _require_live(self, admitted: VersionRef) -> None:
        """Refuse when the version that tokenized is gone: a lost worker is loaded again without asking the admitted.

        Nothing may be awaited between this and the hand-over to the engine.
        """
        if not self._coordinator.serves(admitted.digest):
            raise NotReady("another version was loaded while the prompt was tokenized", advice="send it again")

    def _exchange(
        self,
        ask: AnyRequest,
        *,
        shape: bodies.Shape,
        order: Generate,
        answers: Sequence[Answer],
        outcome: Outcome,
        adapter: Entry | None,
    ) -> Exchange:
        return Exchange(
            shape=shape,
            order=order,
            answers=answers,
            outcome=outcome,
            model=ask.model,
            adapter_digest=adapter.content.digest if adapter is not None else "",
            created=int(self._wall_clock()),
            label=self._resources.label,
            include_usage=ask.stream_options is not None and ask.stream_options.include_usage,
            write_seconds=self._settings.write_seconds,
        )


def _encoder(ask: AnyRequest) -> Callable[[TextModel], tuple[int, ...]]:
    """Return what turns the prompt into tokens; bad prompts are refused here, before the gate."""
    if isinstance(ask, requests.ChatRequest):
        conversation, options = requests.conversation_of(ask), requests.template_options(ask)
        return lambda text: text.encode_chat(conversation, options=options)
    prompt = requests.prompt_of(ask)
    return lambda text: text.encode(prompt) if isinstance(prompt, str) else prompt


async def _bounded(encode_prompt: Callable[[TextModel], tuple[int, ...]], text: TextModel) -> tuple[int, ...]:
    """Tokenize beside the event loop; a template that loops must not hold the gate's lock for ever."""
    try:
        async with asyncio.timeout(ENCODE_SECONDS):
            return await asyncio.to_thread(partial(encode_prompt, text))
    except TimeoutError:
        raise BadRequest(f"the prompt could not be tokenized within {ENCODE_SECONDS:.0f} s") from None
