"""One pass over a LoRAAdapter: says that this release does not load it."""

import msgspec

from modelswap_operator.api.labels import LORAADAPTER_KIND, LORAADAPTERS
from modelswap_operator.api.loraadapter import LoRAAdapterStatus
from modelswap_operator.effects import paths
from modelswap_operator.runtime.task import Again, ObjectTask
from modelswap_operator.status.adapters import not_yet


class AdapterTask(ObjectTask):
    """Keeps the status of one LoRAAdapter honest."""

    kind = LORAADAPTER_KIND
    plural = LORAADAPTERS

    async def look_and_act(self) -> Again:
        """Make one pass."""
        body = await self._tools.kube.get(paths.custom(self.plural, self.namespace, self.name))
        if body is None or body["metadata"].get("deletionTimestamp"):
            return Again(finished=True)
        try:
            before = msgspec.convert(body.get("status") or {}, LoRAAdapterStatus, strict=False)
        except msgspec.ValidationError:
            before = LoRAAdapterStatus()
        after = not_yet(before, generation=int(body["metadata"]["generation"]), now=self._tools.now())
        if after == before:
            return Again()
        shown = await self.show(after, resource_version=body["metadata"]["resourceVersion"])
        return Again(finished=not shown)
