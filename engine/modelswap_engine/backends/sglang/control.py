"""SGLang's control side in the words of :class:`~modelswap_engine.backends.external.control.EngineControl`.

A swap does not pause it: what must not meet a request waits here until there is none (:meth:`SglangControl.drained`),
because SGLang has no drain. An engine that is to be put right is stopped, whoever paused it before, by the retracting
pause: it gives the cache of every request back. SGLang does not acknowledge it: once it has answered nobody is let in,
and whatever the schedulers are told later they do after they have stopped.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from msgspec import structs

from modelswap_engine.backends.adapters import AdapterOptions
from modelswap_engine.backends.external.control import AdapterFacts, Continued, EngineFacts
from modelswap_engine.backends.external.loading import emptied
from modelswap_engine.backends.sglang.answers import Checked, Done, ServerInfo
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.pulse import Pulse
from modelswap_engine.backends.sglang.words import ACTION, ANSWER
from modelswap_engine.protocol.adapters import MOST_ADAPTERS
from modelswap_engine.protocol.errors import BadRequest, DrainTimeout, ModelswapError, WorkerLost
from modelswap_engine.protocol.policy import TrafficMode

ENGINE: Final = "sglang"
_ADAPTER_OPTIONS: Final = AdapterOptions(slots="--enable-lora", rank="--max-lora-rank", held="--max-loaded-loras")
RETRACT: Final = "retract"
REFUSED: Final = {
    TrafficMode.FREEZE.value: "SGLang does not flush its cache while frozen requests hold some of it",
    TrafficMode.OVERLAP.value: "SGLang holds one set of weights",
}
_POLL_SECONDS: Final = 0.005
_LONGEST_POLL_SECONDS: Final = 0.1
_SHORTEST_SECONDS: Final = 1.0  # for a call, however little time is left


class SglangControl:
    """The control side; see the Protocol.

    Args:
        client: the routes.
        pulse: asks for tokens in the background; without it, to ask whether it lives is to wait for one.
    """

    def __init__(self, client: SglangClient, *, pulse: Pulse | None = None) -> None:
        self._client = client
        self._pulse = pulse
        self._boot_id = ""
        self._nonce = ""
        self._label: str | None = None
        self._doubt = ""
        self._halted = False
        self._agent: bool | None = None
        self._ranks = 1

    @property
    def boot_id(self) -> str:
        """The start of the engine that was seen last."""
        return self._boot_id

    async def facts(self, *, seconds: float) -> EngineFacts:
        """Ask what the engine is."""
        boot = await self._client.start()
        server = await self._client.server_info(seconds=seconds)
        model = await self._client.model_info(seconds=seconds)
        self._note(boot.boot_id if boot is not None else self._made_up(server, model.weight_version))
        self._client.away, self._label = False, model.weight_version
        self._ranks = server.tp_size * server.pp_size * server.dp_size
        if self._agent is None:
            self._agent = await self._answers(seconds=seconds)
        return EngineFacts(
            engine=ENGINE,
            version=server.version,
            boot_id=self._boot_id,
            weight_version=model.weight_version,
            ranks=self._ranks,
            served_model_names=(model.served_model_name,),
            agent=self._agent,
            refused=dict(REFUSED),
            adapters=_adapters(server),
        )

    def _made_up(self, server: ServerInfo, label: str) -> str:
        """Name a start without a launcher: SGLang gives its starts no names.

        It tells how long its start took, to the microsecond, and draws a seed unless somebody fixed it; it cannot be
        reached for a while; and it forgets its label.
        """
        if self._client.away or self._label not in (None, label):
            self._nonce = secrets.token_hex(4)
        drawn = f"{server.version} {server.random_seed} {self._nonce} ".encode() + bytes(server.startup_time)
        return hashlib.sha256(drawn).hexdigest()[:16]

    def _note(self, boot_id: str) -> None:
        if boot_id != self._boot_id:
            self._boot_id, self._doubt, self._halted, self._agent = boot_id, "", False, None
            if self._pulse is not None:
                self._pulse.reset()

    async def alive(self, *, seconds: float) -> bool:
        """Say whether all its processes do their work: by a token, or while it is paused by the schedulers' answer."""
        try:
            if self._pulse is not None:
                await self._client.model_info(seconds=seconds)
                return self._pulse.beats(paused=self._halted)
            if not self._halted:
                return await self._client.generates(seconds=seconds)
            await self._client.server_info(seconds=seconds)
        except ModelswapError:
            return False
        return True

    # Pause.

    async def halt(self, *, seconds: float) -> None:
        """Stop the engine without a request in it, paused or not, whoever paused it.

        Requests that somebody retracted are ended before the engine goes on for the moment that its drain takes.

        Raises:
            DrainTimeout: requests that nobody here knows of did not end in time; the engine is not paused.
        """
        ends = time.monotonic() + seconds
        await self._client.abort_all(seconds=seconds)
        await self._client.resume(seconds=seconds)
        await self.drained(seconds=self._left(ends))
        self._halted = True
        await self._client.pause(RETRACT, seconds=self._left(ends))
        if await self._client.ready(seconds=self._left(ends)):
            raise WorkerLost("SGLang goes on although it was paused", advice="it will be restarted")

    async def drained(self, *, seconds: float) -> None:
        """Wait until no request is left.

        The schedulers publish the number of requests when they have read a prompt, and when nothing is left to do; it
        is looked at once they have answered a message of their own, and so have taken in what came before it.

        Raises:
            DrainTimeout: some are.
        """
        ends, pause = time.monotonic() + seconds, _POLL_SECONDS
        while await self._busy(ends):
            if time.monotonic() >= ends:
                raise DrainTimeout(
                    f"requests in SGLang did not end within {seconds:g} s",
                    advice="send requests to the sidecar's port only",
                )
            await asyncio.sleep(pause)
            pause = min(_LONGEST_POLL_SECONDS, pause * 2)

    async def _busy(self, ends: float) -> bool:
        await self._caught_up(ends)
        return await self.requests(seconds=self._left(ends)) > 0

    async def _caught_up(self, ends: float) -> None:
        """Return when the schedulers have carried out what was sent to them before, for they answer in order.

        Told the name that the weights have they do nothing else, and it takes a tenth of the time of other questions.
        """
        if self._label:
            await self._client.set_version(self._label, seconds=self._left(ends))
        else:
            await self._client.server_info(seconds=self._left(ends))

    async def requests(self, *, seconds: float) -> int:
        """Say how many requests the engine has, running or waiting, as published last."""
        return (await self._client.loads(seconds=seconds)).requests

    async def resume(self, *, seconds: float) -> None:
        """Let the schedulers go on, and see that requests are taken again.

        An engine that was asked for its health during a long pause holds itself for unhealthy until it has generated.
        """
        ends = time.monotonic() + seconds
        await self._client.resume(seconds=seconds)
        self._halted = False
        if await self._client.ready(seconds=self._left(ends)):
            return
        if not await self._client.generates(seconds=self._left(ends)):
            raise WorkerLost("SGLang generates nothing after a pause", advice="it will be restarted")

    async def paused(self, *, seconds: float) -> bool:
        """Say whether it takes no requests, which it does not either while it starts or holds itself for unhealthy."""
        return not await self._client.ready(seconds=seconds)

    def _left(self, ends: float) -> float:
        return max(_SHORTEST_SECONDS, ends - time.monotonic())

    # Weights.

    async def flush(self, *, seconds: float) -> bool:
        """Drop the cached keys and values; False when the engine says that it did not."""
        return await self._client.flush(seconds=seconds)

    async def set_version(self, digest: str, *, seconds: float) -> None:
        """Change the label of the weights; ends no request."""
        self._label = None
        await self._client.set_version(digest, seconds=seconds)

    async def update(self, directory: str, digest: str, *, seconds: float) -> Done:
        """Load the tensors of a folder over the live ones; without ``success`` it is open what is live."""
        self._certain()
        self._label = None
        try:
            return await self._client.update_from_disk(directory, digest, seconds=seconds)
        except WorkerLost as error:
            self._doubt = error.message
            raise

    async def load_full(self, directory: str, digest: str, *, seconds: float) -> None:
        """Load a whole checkpoint over the live tensors.

        SGLang empties its cache in the same step, and where a request keeps it from that, calls the load failed.

        Raises:
            Busy: there are requests, and the weights are as before.
            WorkerLost: nobody knows what is live.
        """
        with self._pulse.held() if self._pulse is not None else nullcontext():
            await emptied(self, seconds=seconds)
            done = await self.update(directory, digest, seconds=seconds)
        if not done.success:
            raise WorkerLost(
                f"SGLang may have loaded {directory} in part: {done.message}",
                advice="compare its checksums, or restart it",
            )

    async def checksums(self, *, seconds: float) -> Checked:
        """Have every rank hash its live tensors."""
        self._certain()
        try:
            return await self._client.check("checksum", seconds=seconds)
        except WorkerLost as error:
            self._doubt = error.message
            raise

    async def _answers(self, *, seconds: float) -> bool:
        """Say whether our half is there; asked once for each start, since SGLang logs what it does not know."""
        try:
            await self.call_all("", seconds=seconds)
        except BadRequest:
            return False
        return True

    async def call_all(self, text: str, *, seconds: float) -> Sequence[str]:
        """Carry a text to our half in every rank, as an action of the weights checker."""
        self._certain()
        if text:  # it may change the label in the same step
            self._label = None
        try:
            checked = await self._client.check(ACTION + text, seconds=seconds)
            ranks = sorted(checked.ranks, key=lambda rank: rank.rank)
            answers = [rank.checksums[ANSWER] for rank in ranks if ANSWER in rank.checksums]
            if len(answers) != self._ranks:
                raise WorkerLost(
                    f"{len(answers)} of SGLang's {self._ranks} ranks answered", advice="restart the engine"
                )
        except WorkerLost as error:
            self._doubt = error.message
            raise
        return answers

    def _certain(self) -> None:
        """Refuse calls whose answer may be that of an earlier one, which came late."""
        if self._doubt:
            raise WorkerLost(f"SGLang is not asked again until it was restarted: {self._doubt}")

    # Prompts.

    async def continued(self, text: str, *, tokens: int, logprobs: bool, seconds: float) -> Continued:
        """Ask for a greedy answer; SGLang names tokens where it tells how likely they are, so that is always asked."""
        said = await self._client.generate(text, tokens=tokens, seconds=seconds)
        told = tuple(said.logprobs[len(said.logprobs) - len(said.output_ids) :]) if logprobs else ()
        return Continued(prompt=said.prompt_ids, answer=said.output_ids, logprobs=told)

    async def logprobs(self, tokens: Sequence[int], *, seconds: float) -> Sequence[float]:
        """Ask how likely tokens are."""
        return (await self._client.generate(tokens, tokens=1, seconds=seconds)).logprobs

    async def close(self) -> None:
        """Give connections back."""
        if self._pulse is not None:
            await self._pulse.end()
        await self._client.close()


def _adapters(server: ServerInfo) -> AdapterFacts:
    """Say what it was started with for adapters."""
    if not server.enable_lora:
        return AdapterFacts(reason="SGLang was started without --enable-lora", options=_ADAPTER_OPTIONS)
    if not server.max_lora_rank:
        why = "SGLang was started without --max-lora-rank, and takes no rank that it has not seen"
        return AdapterFacts(reason=why, options=structs.replace(_ADAPTER_OPTIONS, slots="--max-lora-rank"))
    return AdapterFacts(
        slots=server.max_loras_per_batch,
        held=server.max_loaded_loras or MOST_ADAPTERS,
        max_rank=server.max_lora_rank,
        element_bytes=4 if server.dtype == "float32" else 2,
        uniform=True,
        options=_ADAPTER_OPTIONS,
    )
