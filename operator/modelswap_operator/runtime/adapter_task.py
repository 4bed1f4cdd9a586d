"""One pass over a LoRAAdapter: says that this release does not load it."""

import msgspec

from modelswap_operator.api.labels import LORAADAPTER_KIND, LORAADAPTERS
from modelswap_operator.api.loraadapter import LoRAAdapterStatus
from modelswap_operator.effects import paths
from modelswap_operator.effects.kube import ApiNotFound
from modelswap_operator.effects.status import apply_status
from modelswap_operator.runtime.slot_task import Tools
from modelswap_operator.runtime.task import Again, ObjectTask
from modelswap_operator.status.adapters import not_yet


class AdapterTask(ObjectTask):
    """Keeps the status of one LoRAAdapter honest."""

    def __init__(self, tools: Tools, *, namespace: str, name: str) -> None:
        super().__init__(
            kind=LORAADAPTER_KIND,
            namespace=namespace,
            name=name,
            resync=tools.resync,
            random=tools.random,
            metrics=tools.metrics,
        )
        self._tools = tools

    async def look_and_act(self) -> Again:
        """Make one pass."""
        body = await self._tools.kube.get(paths.custom(LORAADAPTERS, self.namespace, self.name))
        if body is None or body["metadata"].get("deletionTimestamp"):
            return Again(finished=True)
        try:
            before = msgspec.convert(body.get("status") or {}, LoRAAdapterStatus, strict=False)
        except msgspec.ValidationError:
            before = LoRAAdapterStatus()
        after = not_yet(before, generation=int(body["metadata"]["generation"]), now=self._tools.now())
        if after == before:
            return Again()
        try:
            await apply_status(
                self._tools.kube,
                kind=LORAADAPTER_KIND,
                plural=LORAADAPTERS,
                namespace=self.namespace,
                name=self.name,
                resource_version=body["metadata"]["resourceVersion"],
                status=after,
            )
        except ApiNotFound:
            return Again(finished=True)
        self._tools.metrics.status_written(self.kind)
        return Again()
