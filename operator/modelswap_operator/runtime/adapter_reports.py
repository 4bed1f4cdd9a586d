"""Writing the statuses of a slot's LoRAAdapters, and the Events that they are worth; their Services before them.

All of them come from one look at the slot, so that hundreds of adapters cost the pods no more questions than one.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from modelswap_operator.api.labels import LORAADAPTER_KIND, LORAADAPTERS
from modelswap_operator.api.loraadapter import LoRAAdapterStatus
from modelswap_operator.effects.adapter_services import AdapterServices, refused
from modelswap_operator.effects.kube import ApiConflict, ApiError, ApiNotFound, ApiUnavailable
from modelswap_operator.effects.observe import Look
from modelswap_operator.effects.status import apply_status
from modelswap_operator.planning.adapter_services import ServiceOutcome, concerned, led_away, wanted_services
from modelswap_operator.planning.snapshot import Adapter, Snapshot
from modelswap_operator.runtime.adapter_memory import AdapterMemory
from modelswap_operator.runtime.tools import Tools
from modelswap_operator.status import events
from modelswap_operator.status.adapters import adapter_statuses
from modelswap_operator.status.conditions import standing

AT_ONCE: Final = 8


class AdapterReports:
    """The adapters of one slot, told."""

    def __init__(self, tools: Tools, *, namespace: str, slot: str, memory: AdapterMemory) -> None:
        self._tools = tools
        self._memory = memory
        self._namespace = namespace
        self._services = AdapterServices(tools.kube, namespace=namespace, slot=slot)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def report(self, look: Look, now: datetime) -> Counter[tuple[str, str]]:
        """Write whatever is new; return what the adapters are, for the metrics.

        Raises:
            ApiError: the API server did not take one of them; the others are written.
        """
        services = await self._serve(look.snapshot) if concerned(look.snapshot) else {}
        found = list(adapter_statuses(look.snapshot, now, services))
        new = [(adapter, status) for adapter, status in found if status != adapter.status]
        answers = await asyncio.gather(*(self._write(look, *item) for item in new), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return Counter((LORAADAPTER_KIND, standing(status.conditions)) for _, status in found)

    async def _serve(self, snapshot: Snapshot) -> dict[str, ServiceOutcome]:
        """Bring the Services to what the adapters ask for, one after the other: two may want the same name.

        Whom they lead to no more is remembered once that is written, from when it was.
        """
        listed: Mapping[str, frozenset[str]] | None = None
        try:
            there = await self._services.read()
        except ApiUnavailable:
            raise
        except ApiError as error:
            wishes = list(wanted_services(snapshot, {}))
            found = {wanted.adapter.name: refused(wanted.adapter, error) for wanted in wishes}
        else:
            listed = there.listed
            wishes = list(wanted_services(snapshot, listed))
            found = {wanted.adapter.name: await self._services.bring(there, wanted) for wanted in wishes}
        away = {
            wanted.adapter.spec.adapter_name: led_away(wanted, found[wanted.adapter.name], listed)
            for wanted in wishes
            if wanted.adapter.spec is not None
        }
        self._memory.led(away, self._tools.now())
        return found

    async def _write(self, look: Look, adapter: Adapter, status: LoRAAdapterStatus) -> None:
        async with self._turns:
            try:
                await apply_status(
                    self._tools.kube,
                    kind=LORAADAPTER_KIND,
                    plural=LORAADAPTERS,
                    namespace=self._namespace,
                    name=adapter.name,
                    resource_version=look.adapter_versions[adapter.name],
                    status=status,
                )
            except (ApiConflict, ApiNotFound):
                return  # it has changed, or is gone: its event asks for another look
            self._tools.metrics.status_written(LORAADAPTER_KIND)
            for note in events.of_adapter(adapter.status, status):
                await self._tools.events.write(
                    kind=LORAADAPTER_KIND,
                    namespace=self._namespace,
                    name=adapter.name,
                    uid=adapter.uid,
                    note=note,
                )
