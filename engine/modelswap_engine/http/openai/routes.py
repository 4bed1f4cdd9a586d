"""The routes of the data port.

The order within a request is the contract with the swap transaction: pass the gate, enter the update lock, acquire the
adapter, tokenize with the admitted version's own tokenizer, hand over to the engine, say so, consume. The contexts
are left in reverse, each exactly once, however the request ends.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from modelswap_engine.backends.port import Generate, Generation
from modelswap_engine.http.bodies import json_response, read_bytes
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.http.openai import bodies, requests
from modelswap_engine.http.openai.answer import Answer
from modelswap_engine.http.openai.errors import ModelNotFound, Overloaded
from modelswap_engine.http.openai.exchange import Exchange, Outcome
from modelswap_engine.http.openai.sampling import generate_of, several
from modelswap_engine.http.openai.text import TextStream
from modelswap_engine.http.resources import VersionResources
from modelswap_engine.http.text_model import TextModel
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.entries import Entry
from modelswap_engine.protocol.adapters import AdapterStatus
from modelswap_engine.protocol.codec import decode
from modelswap_engine.protocol.errors import AdapterNotFound, BadRequest, NotReady
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
        self._adapters = adapters
        self._clock = clock
        self._wall_clock = wall_clock
        self._since = int(wall_clock())
        self._inside = 0

    def routes(self) -> list[web.RouteDef]:
        """Return the route table."""
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
        ]

    async def models(self, _: web.Request) -> web.Response:
        """List the base with the version that is live, and the adapters on it."""
        adapters = self._adapters.registered() if self._adapters is not None else ()
        return json_response(bodies.ModelList(data=[self._card(), *map(self._adapter_card, adapters)]))

    async def model(self, request: web.Request) -> web.Response:
        """Describe the base or an adapter."""
        name = request.match_info["model"]
        self._require_model(name)
        if name == self._settings.served_model_name or self._adapters is None:
            return json_response(self._card())
        return json_response(self._adapter_card(self._adapters.status(name)))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue a prompt."""
        with self._place():
            raw = await read_bytes(request)
            requests.refuse_unsupported(raw)
            return await self._serve(request, decode(raw, requests.CompletionRequest), bodies.Shape(chat=False))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        with self._place():
            raw = await read_bytes(request)
            requests.refuse_unsupported(raw)
            return await self._serve(request, decode(raw, requests.ChatRequest), bodies.Shape(chat=True))

    @contextmanager
    def _place(self, number: int = 1) -> Iterator[None]:
        """Take places, which bound how many bodies and answers are in memory."""
        if number and self._inside + number > self._settings.max_requests:
            raise Overloaded(
                f"{self._inside} requests are being worked on, more are not taken",
                advice="try again shortly, or at another replica",
            )
        self._inside += number
        try:
            yield
        finally:
            self._inside -= number

    async def _serve(self, request: web.Request, ask: AnyRequest, shape: bodies.Shape) -> web.StreamResponse:
        self._require_model(ask.model)
        stops, number = requests.stop_strings(ask), requests.number_of_choices(ask)
        encode_prompt = _encoder(ask)
        required = request.headers.get(REQUIRE_HEADER)
        request_id = f"{shape.prefix}-{secrets.token_hex(12)}"
        with (
            self._place(number - 1),
            Outcome(self._metrics, clock=self._clock, on_lost=self._coordinator.worker_lost) as outcome,
        ):
            async with (
                self._coordinator.admission(require_version=required, request_id=request_id) as admission,
                self._adapter(ask.model) as adapter,
                AsyncExitStack() as streams,
            ):
                live = admission.live
                outcome.version = live.version
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

    @asynccontextmanager
    async def _adapter(self, name: str) -> AsyncIterator[Entry | None]:
        """Have the adapter that a model name asks for, None for the base; never the base in its place."""
        if self._adapters is None or name == self._settings.served_model_name:
            yield None
            return
        async with AsyncExitStack() as stack:
            try:
                entry = await stack.enter_async_context(self._adapters.use(name))
            except AdapterNotFound:
                raise self._no_model(name) from None
            yield entry

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

    def _require_model(self, name: str) -> None:
        if name != self._settings.served_model_name and not (self._adapters is not None and self._adapters.has(name)):
            raise self._no_model(name)

    def _no_model(self, name: str) -> ModelNotFound:
        served = self._settings.served_model_name
        return ModelNotFound(
            f"the model {name[:200]!r} does not exist",
            advice=f"use {served!r}, or an adapter that GET /v1/models lists",
            details={"param": "model"},
        )

    def _card(self) -> bodies.ModelCard:
        live = self._coordinator.state().live
        return bodies.ModelCard(
            id=self._settings.served_model_name,
            created=self._since,
            version=live.version if live else "",
            digest=live.digest if live else "",
        )

    def _adapter_card(self, status: AdapterStatus) -> bodies.ModelCard:
        return bodies.ModelCard(
            id=status.name, created=self._since, digest=status.digest, parent=self._settings.served_model_name
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
