"""vLLM's routes about LoRA adapters; see :class:`~modelswap_engine.backends.external.adapters.AdapterControl`.

An adapter is in two places: its name in the API server, which gives it a number, and its matrices under that number in
each worker's memory. vLLM's own unloading takes the name away and leaves the matrices, which then push others out; and
what was pushed out is still answered for under its name, read again in the middle of a step. So both places are looked
at after each load, and cleared by each unload.
"""

import json
from collections.abc import Sequence
from typing import Final

from modelswap_engine.backends.external.adapters import HeldAdapter
from modelswap_engine.backends.vllm.client import bounded, said
from modelswap_engine.backends.vllm.control import LOAD, VllmControl
from modelswap_engine.protocol.errors import IncompatibleAdapter, WorkerLost

UNLOAD: Final = "/v1/unload_lora_adapter"


class VllmAdapters:
    """The adapters of one vLLM; calls are made one at a time by whoever owns it.

    Args:
        control: its control side.
    """

    def __init__(self, control: VllmControl) -> None:
        self._control = control
        self._boot_id = ""
        self._numbers: dict[str, int] = {}

    async def adapters(self, *, seconds: float) -> Sequence[HeldAdapter]:
        """Ask the API server for names, and all workers for numbers."""
        self._same_start()
        everywhere = set.intersection(*await self._held(seconds=seconds))
        async with bounded("listing models", seconds):
            status, text = await self._control.client.send("GET", "/v1/models")
        if status != 200:
            raise WorkerLost(f"vLLM answers GET /v1/models with {status}: {said(text)}", advice="see the engine's log")
        return [
            HeldAdapter(name=card["id"], directory=card["root"], everywhere=self._numbers.get(card["id"]) in everywhere)
            for card in json.loads(text)["data"]
            if card["parent"] is not None
        ]

    async def load_adapter(self, name: str, directory: str, *, seconds: float) -> None:
        """Load it under a number of its own, which is that of no other content ever."""
        await self.unload_adapter(name, seconds=seconds)
        before = await self._tidied(seconds=seconds)
        # Never in place: cached keys and values of what was there before would stay.
        body = {"lora_name": name, "lora_path": directory, "load_inplace": False}
        status, text = await self._control.ranks.request("POST", LOAD, seconds=seconds, json=body)
        if status != 200:
            if not await self._control.alive(seconds=seconds):
                raise WorkerLost(f"vLLM ended while it loaded {name}: {said(text)}", advice="see the engine's log")
            raise IncompatibleAdapter(f"vLLM refuses adapter {name}: {said(text)}", advice="see the engine's log")
        new = [numbers - before for numbers in await self._held(seconds=seconds)]
        if any(len(numbers) != 1 or numbers != new[0] for numbers in new):
            raise WorkerLost(f"vLLM loaded {name}, and its ranks hold {new}", advice="restart the engine")
        (self._numbers[name],) = new[0]

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Take the name away, and the matrices."""
        self._same_start()
        async with bounded("unloading an adapter", seconds):
            status, text = await self._control.client.send("POST", UNLOAD, json={"lora_name": name})
        if status not in {200, 404}:
            raise WorkerLost(f"vLLM does not unload {name}: {status} {said(text)}", advice="restart the engine")
        number = self._numbers.pop(name, None)
        if number is not None:
            await self._remove(number, seconds=seconds)

    def _same_start(self) -> None:
        """Another start of vLLM counts from the beginning."""
        if self._boot_id != self._control.boot_id:
            self._boot_id = self._control.boot_id
            self._numbers.clear()

    async def _tidied(self, *, seconds: float) -> set[int]:
        """Remove what nobody knows of: loaded by others, or come back with a request whose client had gone."""
        known = set(self._numbers.values())
        for stray in set.union(*await self._held(seconds=seconds)) - known:
            await self._remove(stray, seconds=seconds)
        return known

    async def _remove(self, number: int, *, seconds: float) -> None:
        await self._control.ranks.collective({"method": "remove_lora", "args": [number]}, seconds=seconds)

    async def _held(self, *, seconds: float) -> list[set[int]]:
        """Return the numbers that each worker has in its memory."""
        ranks = await self._control.ranks.collective({"method": "list_loras"}, seconds=seconds)
        if not ranks or not all(isinstance(numbers, list) for numbers in ranks):
            raise WorkerLost(f"vLLM's ranks say {ranks!r} when asked for their adapters", advice="restart the engine")
        return [set(numbers) for numbers in ranks if isinstance(numbers, list)]
