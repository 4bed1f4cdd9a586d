"""SGLang's control routes, one call each: what is sent, what counts as an answer, and what its absence means.

It decides nothing and repeats nothing. Updates and checks go out one at a time: SGLang has one place for the result of
each, and two at once leave a caller waiting for ever. Every connection is a new one: a kept one that the server closes
in the moment of a call looks like a server that died of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from modelswap_engine.backends.external.handshake import Boot, UntrustedError
from modelswap_engine.backends.sglang.answers import (
    Checked,
    Done,
    Generated,
    Loads,
    ModelCard,
    ModelCards,
    ModelInfo,
    ServerInfo,
)
from modelswap_engine.protocol.errors import BadRequest, NotReady, WorkerLost

_OK: Final = 200
_REFUSED: Final = 400
_DENIED: Final = (401, 403)
_SHOWN: Final = 300
_RESTART: Final = "look at the engine's log; it has to be restarted if it does not answer again"

AnswerT = TypeVar("AnswerT")


class Answered(msgspec.Struct, frozen=True):
    """A status and a body."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body as it may be shown."""
        return self.body.decode(errors="replace")[:_SHOWN]


class SglangClient:
    """The calls; see :class:`~modelswap_engine.backends.external.control.EngineControl` for what they raise.

    Args:
        url: of the engine, without a path.
        started: reads what its launcher says of its present start, whose admin key it then asks for; None where it has
            neither a launcher nor a key.

    Attributes:
        away: set when it could not be reached; whoever looks at it clears it.
    """

    def __init__(self, url: str, *, started: Callable[[], Boot | None] | None = None) -> None:
        self._url = url.rstrip("/")
        self._started = started
        self._session: aiohttp.ClientSession | None = None
        self._turn = asyncio.Lock()
        self.away = False

    async def close(self) -> None:
        """Give connections back."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # What it is.

    async def start(self) -> Boot | None:
        """Return what its launcher says of its present start, None without one.

        Raises:
            NotReady: it says nothing.
        """
        if self._started is None:
            return None
        try:
            boot = await asyncio.to_thread(self._started)
        except UntrustedError as error:
            raise NotReady(str(error), advice="run the sidecar and the launcher as one user") from None
        if boot is None:
            self.away = True
            raise NotReady("SGLang's launcher has not started it", advice="look at the log of the engine's container")
        return boot

    async def ready(self, *, seconds: float) -> bool:
        """Say whether it takes requests: it is up, not paused, and its last generating probe succeeded."""
        return (await self._send("GET", "/ready", seconds=seconds)).status == _OK

    async def generates(self, *, seconds: float) -> bool:
        """Have it make one token; also what ends its belief that it is unhealthy. Never while it is paused."""
        return (await self._send("GET", "/health_generate", seconds=seconds)).status == _OK

    async def model_info(self, *, seconds: float) -> ModelInfo:
        """Ask for the path and the label of the weights."""
        return await self._ask("GET", "/model_info", ModelInfo, seconds=seconds)

    async def server_info(self, *, seconds: float) -> ServerInfo:
        """Ask for the arguments of this start; every scheduler has a part in the answer."""
        return await self._ask("GET", "/server_info", ServerInfo, seconds=seconds)

    async def loads(self, *, seconds: float) -> Loads:
        """Ask for the numbers of requests."""
        return await self._ask("GET", "/v1/loads", Loads, seconds=seconds)

    async def generate(self, prompt: str | Sequence[int], *, tokens: int, seconds: float) -> Generated:
        """Have a prompt continued greedily, with the log-probabilities of all its tokens.

        Raises:
            BadRequest: it does not run this prompt.
        """
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt if isinstance(prompt, str) else list(prompt),
            "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answered = await self._send("POST", "/generate", body, seconds=seconds)
        if answered.status == _REFUSED:
            raise BadRequest(f"SGLang refused /generate: {answered.text}")
        if answered.status != _OK:
            raise _unusable("/generate", answered)
        return _decode(answered, Generated, "/generate")

    # Pause.

    async def pause(self, mode: str, *, seconds: float) -> None:
        """Send a pause to the schedulers; except for ``abort`` its answer does not mean that they have stopped."""
        await self._do("/pause_generation", {"mode": mode}, seconds=seconds)

    async def resume(self, *, seconds: float) -> None:
        """Let the schedulers go on; one that is not paused does."""
        await self._do("/continue_generation", {"torch_empty_cache": False}, seconds=seconds)

    async def abort_all(self, *, seconds: float) -> None:
        """End all requests."""
        await self._do("/abort_request", {"abort_all": True}, seconds=seconds)

    async def flush(self, *, seconds: float) -> bool:
        """Drop all cached keys and values; False when it did not because requests hold some."""
        answered = await self._send("POST", "/flush_cache", seconds=seconds)
        return answered.status == _OK

    # Adapters.

    async def models(self, *, seconds: float) -> Sequence[ModelCard]:
        """List the models that it serves: the base, and with a parent its adapters."""
        return (await self._ask("GET", "/v1/models", ModelCards, seconds=seconds)).data

    async def load_adapter(self, name: str, path: str, *, seconds: float) -> None:
        """Have every rank load an adapter. Not pinned: that would take a place in every batch."""
        await self._do("/load_lora_adapter", {"lora_name": name, "lora_path": path, "pinned": False}, seconds=seconds)

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Have every rank forget an adapter when no request uses it."""
        await self._do("/unload_lora_adapter", {"lora_name": name}, seconds=seconds)

    # Weights.

    async def update_from_disk(self, path: str, version: str, *, seconds: float) -> Done:
        """Load the tensors of a folder over the live ones. ``success`` False leaves open what is live now.

        No request is aborted, the cache is flushed in the same step, and the label travels with the call.
        """
        body = {
            "model_path": path,
            "weight_version": version,
            "abort_all_requests": False,
            "flush_cache": True,
        }
        answered = await self._alone("/update_weights_from_disk", body, seconds=seconds)
        if answered.status not in (_OK, _REFUSED):
            raise _unusable("/update_weights_from_disk", answered)
        done = _decode(answered, Done, "/update_weights_from_disk")
        return msgspec.structs.replace(done, success=done.success and answered.status == _OK)

    async def set_version(self, version: str, *, seconds: float) -> None:
        """Change the label of the weights; without ``abort_all_requests`` SGLang would end every request for it."""
        await self._do("/update_weight_version", {"new_version": version, "abort_all_requests": False}, seconds=seconds)

    async def check(self, action: str, *, seconds: float) -> Checked:
        """Carry an action of the weights checker to every rank.

        Raises:
            BadRequest: it knows no such action.
        """
        answered = await self._alone("/weights_checker", {"action": action}, seconds=seconds)
        if answered.status not in (_OK, _REFUSED):
            raise _unusable("/weights_checker", answered)
        checked = _decode(answered, Checked, "/weights_checker")
        if answered.status == _REFUSED or not checked.success:
            raise BadRequest(f"SGLang refused {action[:40]!r}: {checked.message[:_SHOWN]}")
        return checked

    # How.

    async def _ask(self, method: str, path: str, kind: type[AnswerT], *, seconds: float) -> AnswerT:
        answered = await self._send(method, path, seconds=seconds)
        if answered.status != _OK:
            raise _unusable(path, answered)
        return _decode(answered, kind, path)

    async def _do(self, path: str, body: dict[str, Any], *, seconds: float) -> None:
        answered = await self._send("POST", path, body, seconds=seconds)
        if answered.status == _REFUSED:
            raise BadRequest(f"SGLang refused {path}: {answered.text}")
        if answered.status != _OK:
            raise _unusable(path, answered)

    async def _alone(self, path: str, body: dict[str, Any], *, seconds: float) -> Answered:
        try:
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise NotReady(f"SGLang is still at work on an earlier call, {path} was not sent") from None
        task = asyncio.ensure_future(self._send("POST", path, body, seconds=seconds))
        task.add_done_callback(self._over)
        return await asyncio.shield(task)  # who gives up must not hand its answer to the next caller

    def _over(self, task: asyncio.Future[Answered]) -> None:
        self._turn.release()
        if not task.cancelled():
            task.exception()  # looked at: nobody may be left who waits for it

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float) -> Answered:
        boot = await self.start()
        headers = {"Authorization": f"Bearer {boot.admin_key}"} if boot is not None else {}
        try:
            async with (
                asyncio.timeout(seconds),
                self._connection().request(method, self._url + path, json=body, headers=headers) as response,
            ):
                answered = Answered(response.status, await response.read())
        except aiohttp.ClientConnectorError as error:
            self.away = True
            raise NotReady(
                f"SGLang at {self._url} cannot be reached: {error.os_error.strerror or error.os_error}",
                advice="it is starting or has ended; look at the engine's log",
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else type(error).__name__
            raise WorkerLost(f"SGLang did not answer {path}: {why}", advice=_RESTART) from None
        if answered.status in _DENIED:
            raise NotReady(
                f"SGLang refuses {path} without its admin key",
                advice="start it without --admin-api-key, or by modelswap's launcher, which tells the sidecar its key",
            )
        return answered

    def _connection(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,  # the engine is on this machine, whatever proxy the environment names
            )
        return self._session


def _unusable(path: str, answered: Answered) -> WorkerLost:
    return WorkerLost(f"SGLang answered {path} with {answered.status}: {answered.text}", advice=_RESTART)


def _decode(answered: Answered, kind: type[AnswerT], path: str) -> AnswerT:
    try:
        return msgspec.json.decode(answered.body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WorkerLost(
            f"SGLang's answer to {path} has another shape than expected: {error}",
            advice="use a version of SGLang that this release of modelswap was tested with",
        ) from None
