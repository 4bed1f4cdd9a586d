"""vLLM's control side over HTTP; see :class:`~modelswap_engine.backends.external.control.EngineControl`.

Most of these routes exist only with ``VLLM_SERVER_DEV_MODE=1``. What they are known to do wrong is dealt with here: a
flush that says 200 and did not happen, a pause that says 500 and did, and answers of several ranks that belong to the
call before once one of them has failed.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import aiohttp
from msgspec import structs

from modelswap_engine.backends.adapters import AdapterOptions
from modelswap_engine.backends.external.control import AdapterFacts, EngineFacts
from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.errors import BadRequest, NotReady, WorkerLost

T = TypeVar("T")

METHOD: Final = "modelswap"
LOAD: Final = "/v1/load_lora_adapter"
EXTENSION: Final = "modelswap_engine.backends.vllm.extension.ModelswapExtension"
_PAUSES: Final[Mapping[RequestPolicy, Mapping[str, str]]] = {
    RequestPolicy.NONE_RUNNING: {"mode": "wait", "clear_cache": "true"},
    RequestPolicy.RECOMPUTE: {"mode": "keep", "clear_cache": "true"},
    RequestPolicy.FREEZE: {"mode": "keep", "clear_cache": "false"},
    RequestPolicy.ABORT: {"mode": "abort", "clear_cache": "true"},
}
_PARAMETER: Final = re.compile(r"dp0:pp0:pcp0:tp(?P<rank>\d+):(?P<name>.+)")
_POLL_SECONDS: Final = 0.002
_NOTHING: Final = hashlib.sha256(b"").hexdigest()
_STARTED: Final = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_ADAPTER_OPTIONS: Final = AdapterOptions(slots="--enable-lora", rank="--max-lora-rank", held="--max-cpu-loras")
_RUNTIME: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
_DEVELOPMENT: Final = "start vLLM with VLLM_SERVER_DEV_MODE=1, on a loopback address"


class VllmControl:
    """One vLLM server.

    Args:
        url: where it listens.
        session: used for all requests, and by nobody else; closed with the control.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._calling = asyncio.Lock()
        self._under_way: set[asyncio.Future[Any]] = set()
        self._made_up = uuid.uuid4().hex
        self._away = False
        self._boot_id = ""
        self._ranks = 1
        self._mixed_up: str | None = None
        self._policy: RequestPolicy | None = None

    @property
    def boot_id(self) -> str:
        """The start of the engine that was seen last."""
        return self._boot_id

    async def facts(self, *, seconds: float) -> EngineFacts:
        """Ask the engine's routes that ask no rank."""
        async with bounded("asking what it is", seconds):
            version = await self._get("/version")
            models = await self._get("/v1/models")
            boot_id = await self._start()
            info = await self._configuration()
            weights = await self._development("/weight_info")
            adapters = await self._adapters(info)
        config = info.get("vllm_config", {}) if info else {}
        self._ranks = _number(config, "parallel_config", "world_size", default=1)
        self._seen(boot_id)
        extension = _field(config, "parallel_config", "worker_extension_cls")
        bases = [str(model["id"]) for model in models.get("data", []) if model.get("parent") is None]
        return EngineFacts(
            engine="vllm",
            version=str(version.get("version", "")),
            boot_id=boot_id,
            weight_version=str(weights.get("weight_version", "")) if weights else "",
            ranks=self._ranks,
            served_model_names=tuple(bases),
            agent=extension == EXTENSION,
            policies=frozenset(_PAUSES) if info else frozenset(),
            refused={} if info else {"weights": f"its control routes are not there; {_DEVELOPMENT}"},
            adapters=adapters,
        )

    async def _adapters(self, info: dict[str, Any] | None) -> AdapterFacts:
        """Ask what it was started with for adapters, and whether they can come and go."""
        if info is None:
            return AdapterFacts(reason=f"its control routes are not there; {_DEVELOPMENT}", options=_ADAPTER_OPTIONS)
        lora = info.get("vllm_config", {}).get("lora_config")
        if not isinstance(lora, dict):
            return AdapterFacts(reason="vLLM was started without --enable-lora", options=_ADAPTER_OPTIONS)
        status, _ = await self.send("POST", LOAD, json={})  # which is refused where it exists
        if status == 404:
            return AdapterFacts(
                reason=f"vLLM was started without {_RUNTIME}", options=structs.replace(_ADAPTER_OPTIONS, slots=_RUNTIME)
            )
        slots = int(lora.get("max_loras") or 0)
        return AdapterFacts(
            slots=slots,
            held=int(lora.get("max_cpu_loras") or slots),
            max_rank=int(lora.get("max_lora_rank") or 0),
            element_bytes=4 if "float32" in str(lora.get("lora_dtype")) else 2,
            options=_ADAPTER_OPTIONS,
        )

    async def _configuration(self) -> dict[str, Any] | None:
        """Ask what it was started with; the same answer lists the packages of its environment."""
        try:
            return await self._development("/server_info", config_format="json")
        except WorkerLost as error:
            raise WorkerLost(
                f"{error.message} (this route fails where vLLM's environment has neither pip nor uv)",
                advice="use an image of vLLM that has pip, or see the engine's log",
            ) from error

    async def _start(self) -> str:
        """Name the present start of the server: by when it began where it says so, else by whether it was away."""
        text = await self._text("/metrics")
        found = _STARTED.search(text)
        if found is not None:
            return f"vllm-{found[1]}"
        if self._away:
            self._made_up, self._away = uuid.uuid4().hex, False
        return self._made_up

    def _seen(self, boot_id: str) -> None:
        if boot_id != self._boot_id:
            self._boot_id, self._mixed_up, self._policy = boot_id, None, None

    async def alive(self, *, seconds: float) -> bool:
        """Ask for its health, which is bad once the process that computes is gone."""
        try:
            async with asyncio.timeout(seconds):
                status, _ = await self.send("GET", "/health")
                return status == 200
        except (NotReady, WorkerLost, TimeoutError):
            self._away = True
            return False

    async def pause(self, policy: RequestPolicy, *, seconds: float) -> None:
        """Pause once; a second call of vLLM's would treat requests that wait as if they ran.

        vLLM answers 20 ms after it has stopped; that it has is seen before, from what it says of itself.
        """
        if policy not in _PAUSES:
            raise BadRequest(f"vLLM has no pause for {policy}")
        async with bounded("pausing", seconds):
            if await self._paused():
                self._same_policy(policy)
                return
            self._policy = policy
            asked = self._in_background(self._ask("POST", "/pause", params=_PAUSES[policy]))
            try:
                while True:
                    answered = asked.done()
                    if await self._stopped(policy):
                        return
                    if answered:
                        await asked
                        raise WorkerLost("vLLM says that it paused, and that it is not paused", advice="resume it")
                    await asyncio.sleep(_POLL_SECONDS)
            except BaseException:
                asked.cancel()
                raise

    async def _stopped(self, policy: RequestPolicy) -> bool:
        """Say whether it is paused; that a request it waits for has ended shows in what it can forget."""
        if not await self._paused():
            return False
        return policy is not RequestPolicy.NONE_RUNNING or await self._flush()

    def _same_policy(self, policy: RequestPolicy) -> None:
        if self._policy is not policy:
            raise BadRequest(
                f"vLLM is paused already ({self._policy or 'by somebody else'}), not for {policy}",
                advice="resume it first",
            )

    async def resume(self, *, seconds: float) -> None:
        """Resume and read back."""
        async with bounded("resuming", seconds):
            await self._ask("POST", "/resume")
            if await self._paused():
                raise WorkerLost("vLLM says that it resumed, and that it is paused", advice="restart the engine")
            self._policy = None

    async def paused(self, *, seconds: float) -> bool:
        """Ask."""
        async with bounded("asking whether it is paused", seconds):
            return await self._paused()

    async def _paused(self) -> bool:
        return (await self._ask("GET", "/is_paused")).get("is_paused") is True

    async def flush(self, *, seconds: float) -> bool:
        """Reset the prefix cache; the status is 200 either way."""
        async with bounded("flushing", seconds):
            return await self._flush()

    async def _flush(self) -> bool:
        return (await self._ask("POST", "/reset_prefix_cache")).get("success") is True

    async def call_all(self, text: str, *, seconds: float) -> Sequence[str]:
        """Call our method on every worker."""
        answers = await self.collective({"method": METHOD, "args": [text]}, seconds=seconds)
        wrong = [answer for answer in answers if not isinstance(answer, str)]
        if wrong or len(answers) != self._ranks:
            self._mixed_up = self._boot_id
            raise WorkerLost(
                f"{len(answers)} ranks of {self._ranks} answered with text ({len(wrong)} of them did not)",
                advice="restart the engine: later answers may belong to this call",
            )
        return [str(answer) for answer in answers]

    async def collective(self, call: dict[str, Any], *, seconds: float) -> list[object]:
        """Call a method of every worker, and return their results in order; raises as :meth:`call_all` does."""
        answer = await self._ask_ranks("/collective_rpc", {**call, "timeout": seconds}, seconds=seconds)
        results = answer.get("results")
        return results if isinstance(results, list) else []

    async def _ask_ranks(self, path: str, body: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        return await self._to_its_end(self._ranks_answer(path, body, seconds=seconds))

    async def _ranks_answer(self, path: str, body: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        async with self._alone():
            try:
                async with bounded("calling all ranks", seconds):
                    return await self._ask("POST", path, json=body)
            except (NotReady, BadRequest):
                raise
            except BaseException:
                self._mixed_up = self._boot_id
                raise

    async def through_ranks(self, verb: str, path: str, *, seconds: float, **options: Any) -> tuple[int, str]:
        """Make a request that vLLM itself turns into a call to all ranks; return its status and text.

        Raises:
            NotReady, WorkerLost: as :meth:`call_all`; also where one of several ranks refused, for the others' answers
                stay behind.
        """
        return await self._to_its_end(self._through_ranks(verb, path, seconds=seconds, **options))

    async def _through_ranks(self, verb: str, path: str, *, seconds: float, **options: Any) -> tuple[int, str]:
        async with self._alone():
            try:
                async with bounded(f"{verb} {path}", seconds):
                    status, text = await self.send(verb, path, **options)
            except NotReady:
                raise
            except BaseException:
                self._mixed_up = self._boot_id
                raise
            if status not in {200, 400} and self._ranks > 1:
                self._mixed_up = self._boot_id
                raise WorkerLost(
                    f"a rank of {self._ranks} refused {verb} {path}: {said(text)}", advice="restart the engine"
                )
            return status, text

    async def _to_its_end(self, call: Coroutine[Any, Any, T]) -> T:
        """Have a call to the ranks answered also where whoever waits for it gives up, as a check does for a swap.

        A call that is broken off leaves answers behind, and costs a restart of the engine.
        """
        return await asyncio.shield(self._in_background(call))

    def _in_background(self, call: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        task = asyncio.ensure_future(call)
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Future[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: nobody may be left who waits for it

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        async with self._calling:
            if self._mixed_up is not None:
                raise WorkerLost(
                    "an earlier call to vLLM's ranks failed; answers to later ones may belong to it",
                    advice="restart the engine",
                )
            yield

    async def set_version(self, digest: str, *, seconds: float) -> None:
        """Change the label and read it back."""
        async with bounded("labelling", seconds):
            await self._ask("POST", "/update_weight_version", json={"new_version": digest})
            label = (await self._ask("GET", "/weight_info")).get("weight_version")
        if label != digest:
            raise WorkerLost(f"vLLM calls its weights {label!r} after it was told {digest!r}", advice="try again")

    async def load_full(self, directory: str, digest: str, *, seconds: float) -> None:
        """Have every worker reload, and change the label."""
        await self.reload(directory, seconds=seconds)
        await self.set_version(digest, seconds=seconds)

    async def reload(self, directory: str, *, seconds: float) -> None:
        """Have every worker load what is in a folder over its live tensors; the label stays.

        A part of a fused parameter leaves the rest of it undefined, and a failed reload leaves a worker without
        weights; nothing but its answer says so.
        """
        arguments = {"weights_path": directory, "is_checkpoint_format": True}
        results = await self.collective({"method": "reload_weights", "kwargs": arguments}, seconds=seconds)
        if results != [None] * self._ranks:
            self._mixed_up = self._boot_id
            raise WorkerLost(
                f"{len(results)} ranks of {self._ranks} answered a load, and not all with nothing",
                advice="restart the engine: later answers may belong to this call",
            )

    async def checksums(self, *, seconds: float) -> dict[int, dict[str, str]]:
        """Ask for the sha256 of every live parameter, by rank and name; "" for one that is not where it is looked for.

        On a processor linear layers keep their weights packed, and what is hashed in their place is nothing.
        """
        answer = await self._ask_ranks("/weight_checker", {"action": "checksum"}, seconds=seconds)
        found: dict[int, dict[str, str]] = {}
        for key, value in answer.get("checksums", {}).items():
            where = _PARAMETER.fullmatch(key)
            if where is None:
                raise WorkerLost(
                    f"vLLM shows a checksum of {key!r}, which names no rank", advice="see its release notes"
                )
            found.setdefault(int(where["rank"]), {})[where["name"]] = "" if value == _NOTHING else str(value)
        return found

    async def config(self, *, seconds: float) -> dict[str, Any]:
        """Ask what it was started with; empty where it does not tell."""
        async with bounded("asking what it was started with", seconds):
            info = await self._development("/server_info", config_format="json")
        found = info.get("vllm_config") if info else None
        return found if isinstance(found, dict) else {}

    async def close(self) -> None:
        """Give up calls that nobody waits for any more, and close the session."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._session.close()

    async def _development(self, path: str, **params: str) -> dict[str, Any] | None:
        """Return the answer of a route that may not be there."""
        try:
            return await self._ask("GET", path, params=params)
        except BadRequest:
            return None

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._ask("GET", path)

    async def _text(self, path: str) -> str:
        status, text = await self.send("GET", path)
        return text if status == 200 else ""

    async def _ask(self, verb: str, path: str, **options: Any) -> dict[str, Any]:
        status, text = await self.send(verb, path, **options)
        if status in {400, 404, 405, 422}:
            raise BadRequest(f"vLLM refuses {verb} {path}: {status} {said(text)}", advice=_DEVELOPMENT)
        if status != 200:
            raise WorkerLost(f"vLLM answers {verb} {path} with {status}: {said(text)}", advice="see the engine's log")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    async def send(self, verb: str, path: str, **options: Any) -> tuple[int, str]:
        """Make one request, and return its status and text; the caller bounds it."""
        # A connection that was kept may be closed just as it is used again; then nobody knows whether the call arrived.
        alone = {"Connection": "close"}
        try:
            async with self._session.request(verb, f"{self._url}{path}", headers=alone, **options) as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientConnectorError as error:
            self._away = True
            raise NotReady(f"vLLM does not listen at {self._url}: {error}", advice="see the engine's log") from error
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            self._away = True
            raise WorkerLost(
                f"vLLM broke off {verb} {path}: {str(error) or type(error).__name__}", advice="see the engine's log"
            ) from error


@contextlib.asynccontextmanager
async def bounded(doing: str, seconds: float) -> AsyncIterator[None]:
    """Give several requests a time; to run out of it is to have no usable answer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as late:
        raise WorkerLost(f"{doing}: vLLM gave no answer within {seconds:g} s", advice="see the engine's log") from late


def said(text: str) -> str:
    """Return what an error of vLLM's says, without what is around it."""
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _field(config: Any, part: str, name: str) -> Any:
    inside = config.get(part) if isinstance(config, dict) else None
    return inside.get(name) if isinstance(inside, dict) else None


def _number(config: Any, part: str, name: str, *, default: int) -> int:
    found = _field(config, part, name)
    return found if isinstance(found, int) else default
