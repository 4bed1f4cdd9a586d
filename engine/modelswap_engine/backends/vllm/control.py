"""vLLM's control side over HTTP; see :class:`~modelswap_engine.backends.external.control.EngineControl`.

Most of these routes exist only with ``VLLM_SERVER_DEV_MODE=1``. What they are known to do wrong is dealt with here: a
flush that says 200 and did not happen, and a pause that says 500 and did.
"""

import asyncio
import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
from msgspec import structs

from modelswap_engine.backends.adapters import AdapterOptions
from modelswap_engine.backends.external.control import AdapterFacts, Continued, EngineFacts
from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.backends.vllm import completions
from modelswap_engine.backends.vllm.client import DEVELOPMENT, VllmClient, bounded
from modelswap_engine.backends.vllm.ranks import RankCalls
from modelswap_engine.protocol.errors import BadRequest, NotReady, WorkerLost

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


class VllmControl:
    """One vLLM server.

    Args:
        url: where it listens.
        session: used for all requests, and by nobody else; closed with the control.

    Attributes:
        client: makes its requests.
        ranks: calls all its ranks.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.client = VllmClient(url, session)
        self.ranks = RankCalls(self.client)
        self._made_up = uuid.uuid4().hex
        self._boot_id = ""
        self._policy: RequestPolicy | None = None

    @property
    def boot_id(self) -> str:
        """The start of the engine that was seen last."""
        return self._boot_id

    async def facts(self, *, seconds: float) -> EngineFacts:
        """Ask the engine's routes that ask no rank."""
        async with bounded("asking what it is", seconds):
            version = await self.client.ask("GET", "/version")
            models = await self.client.ask("GET", "/v1/models")
            boot_id = await self._start()
            info = await self._configuration()
            weights = await self.client.development("/weight_info")
            adapters = await self._adapters(info)
        config = info.get("vllm_config", {}) if info else {}
        self.ranks.count = _number(config, "parallel_config", "world_size", default=1)
        self._seen(boot_id)
        extension = _field(config, "parallel_config", "worker_extension_cls")
        bases = [str(model["id"]) for model in models.get("data", []) if model.get("parent") is None]
        return EngineFacts(
            engine="vllm",
            version=str(version.get("version", "")),
            boot_id=boot_id,
            weight_version=str(weights.get("weight_version", "")) if weights else "",
            ranks=self.ranks.count,
            served_model_names=tuple(bases),
            agent=extension == EXTENSION,
            refused={} if info else {"weights": f"its control routes are not there; {DEVELOPMENT}"},
            adapters=adapters,
        )

    async def _adapters(self, info: dict[str, Any] | None) -> AdapterFacts:
        """Ask what it was started with for adapters, and whether they can come and go."""
        if info is None:
            return AdapterFacts(reason=f"its control routes are not there; {DEVELOPMENT}", options=_ADAPTER_OPTIONS)
        lora = info.get("vllm_config", {}).get("lora_config")
        if not isinstance(lora, dict):
            return AdapterFacts(reason="vLLM was started without --enable-lora", options=_ADAPTER_OPTIONS)
        status, _ = await self.client.send("POST", LOAD, json={})  # which is refused where it exists
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
            return await self.client.development("/server_info", config_format="json")
        except WorkerLost as error:
            raise WorkerLost(
                f"{error.message} (this route fails where vLLM's environment has neither pip nor uv)",
                advice="use an image of vLLM that has pip, or see the engine's log",
            ) from error

    async def _start(self) -> str:
        """Name the present start of the server: by when it began where it says so, else by whether it was away."""
        text = await self.client.text("/metrics")
        found = _STARTED.search(text)
        if found is not None:
            return f"vllm-{found[1]}"
        if self.client.away:
            self._made_up, self.client.away = uuid.uuid4().hex, False
        return self._made_up

    def _seen(self, boot_id: str) -> None:
        if boot_id != self._boot_id:
            self._boot_id, self._policy = boot_id, None
            self.ranks.started_again()

    async def alive(self, *, seconds: float) -> bool:
        """Ask for its health, which is bad once the process that computes is gone."""
        try:
            async with asyncio.timeout(seconds):
                status, _ = await self.client.send("GET", "/health")
                return status == 200
        except (NotReady, WorkerLost, TimeoutError):
            self.client.away = True
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
            asked = self.client.in_background(self.client.ask("POST", "/pause", params=_PAUSES[policy]))
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
            await self.client.ask("POST", "/resume")
            if await self._paused():
                raise WorkerLost("vLLM says that it resumed, and that it is paused", advice="restart the engine")
            self._policy = None

    async def paused(self, *, seconds: float) -> bool:
        """Ask."""
        async with bounded("asking whether it is paused", seconds):
            return await self._paused()

    async def _paused(self) -> bool:
        return (await self.client.ask("GET", "/is_paused")).get("is_paused") is True

    async def flush(self, *, seconds: float) -> bool:
        """Reset the prefix cache; the status is 200 either way."""
        async with bounded("flushing", seconds):
            return await self._flush()

    async def _flush(self) -> bool:
        return (await self.client.ask("POST", "/reset_prefix_cache")).get("success") is True

    async def call_all(self, text: str, *, seconds: float) -> Sequence[str]:
        """Call our method on every worker."""
        answers = await self.ranks.collective({"method": METHOD, "args": [text]}, seconds=seconds)
        wrong = [answer for answer in answers if not isinstance(answer, str)]
        if wrong or len(answers) != self.ranks.count:
            raise self.ranks.mixed_up(
                f"{len(answers)} ranks of {self.ranks.count} answered with text ({len(wrong)} of them did not)"
            )
        return [str(answer) for answer in answers]

    async def set_version(self, digest: str, *, seconds: float) -> None:
        """Change the label; vLLM answers once the process that keeps it has done so."""
        async with bounded("labelling", seconds):
            answer = await self.client.ask("POST", "/update_weight_version", json={"new_version": digest})
        label = answer.get("new_version") if answer.get("success") is True else None
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
        results = await self.ranks.collective({"method": "reload_weights", "kwargs": arguments}, seconds=seconds)
        if results != [None] * self.ranks.count:
            raise self.ranks.mixed_up(
                f"{len(results)} ranks of {self.ranks.count} answered a load, and not all with nothing"
            )

    async def checksums(self, *, seconds: float) -> dict[int, dict[str, str]]:
        """Ask for the sha256 of every live parameter, by rank and name; "" for one that is not where it is looked for.

        On a processor linear layers keep their weights packed, and what is hashed in their place is nothing.
        """
        answer = await self.ranks.ask("/weight_checker", {"action": "checksum"}, seconds=seconds)
        found: dict[int, dict[str, str]] = {}
        for key, value in answer.get("checksums", {}).items():
            where = _PARAMETER.fullmatch(key)
            if where is None:
                raise WorkerLost(
                    f"vLLM shows a checksum of {key!r}, which names no rank", advice="see its release notes"
                )
            found.setdefault(int(where["rank"]), {})[where["name"]] = "" if value == _NOTHING else str(value)
        return found

    async def continued(self, text: str, *, tokens: int, logprobs: bool, seconds: float) -> Continued:
        """Ask for a greedy answer."""
        async with bounded("a prompt of checks", seconds):
            body = completions.going_on(text, tokens=tokens, logprobs=logprobs)
            return completions.continued(await self.client.ask("POST", completions.ROUTE, json=body))

    async def logprobs(self, tokens: Sequence[int], *, seconds: float) -> Sequence[float]:
        """Ask how likely tokens are; of numbers like NaN vLLM says nothing but a refusal."""
        async with bounded("a prompt of checks", seconds):
            body = completions.scoring(tokens)
            return completions.logprobs(await self.client.ask("POST", completions.ROUTE, json=body), tokens)

    async def config(self, *, seconds: float) -> dict[str, Any]:
        """Ask what it was started with; empty where it does not tell."""
        async with bounded("asking what it was started with", seconds):
            info = await self.client.development("/server_info", config_format="json")
        found = info.get("vllm_config") if info else None
        return found if isinstance(found, dict) else {}

    async def close(self) -> None:
        """Give up calls that nobody waits for any more, and close the session."""
        await self.client.close()


def _field(config: Any, part: str, name: str) -> Any:
    inside = config.get(part) if isinstance(config, dict) else None
    return inside.get(name) if isinstance(inside, dict) else None


def _number(config: Any, part: str, name: str, *, default: int) -> int:
    found = _field(config, part, name)
    return found if isinstance(found, int) else default
