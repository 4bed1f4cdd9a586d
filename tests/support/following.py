"""The adapters of one pod and what is assigned to it, with an engine and sources in memory and time by hand.

What survives the process (journal, mounted file, sources) is in `FakeBase` and `FakeOpener`; `restart` is another
process. A stand-in for tests of `lora.following` only.
"""

from collections.abc import Callable
from typing import Any

from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.lora.vouching import Vouching
from modelswap_engine.protocol.adapter_calls import AssignAdaptersRequest, LoadAdapterRequest
from modelswap_engine.protocol.adapters import AdapterSource, AdapterState, AssignedState
from modelswap_engine.protocol.assignment import AssignedAdapter, AssignedSource, Assignment
from modelswap_engine.protocol.messages import Fence
from tests.support.clock import ManualClock
from tests.support.fake_adapters import FakeBase, FakeHost, FakeOpener

OWNER = "model-version-1"
OTHER_BASE = "sha256:" + "d" * 64


async def _inline(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


class World:
    def __init__(self, *, slots: int = 4, **bounds: Any) -> None:
        self.clock, self.host, self.opener = ManualClock(), FakeHost(slots=slots), FakeOpener()
        self.base = FakeBase()
        self.settings = LoraSettings(slots=slots, served_model_name="base", pod_uid="pod", **bounds)
        self.desk = self.process()

    def process(self) -> AdapterDesk:
        desk = AdapterDesk(
            host=self.host,
            opener=self.opener,
            clock=self.clock,
            settings=self.settings,
            vouching=Vouching(offload=_inline),
        )
        desk.attach(self.base)
        return desk

    async def restart(self) -> None:
        await self.desk.stop()
        self.host.lose()
        self.desk = self.process()
        assert self.base.live is not None
        await self.clock.run(self.desk.restore(self.base.live))
        self.desk.activate(self.base.live.digest)
        await self.clock.settle()

    def item(
        self, name: str, content: str = "one", *, base: str = "", place: str = "file:///adapters", **more: Any
    ) -> AssignedAdapter:
        uri = self.opener.put(f"{place}/{name}/{content}", content)
        return AssignedAdapter(name=name, sources=[AssignedSource(uri=uri, base_digest=base)], **more)

    async def assign(self, *items: AssignedAdapter, revision: int, owner: str = OWNER, epoch: int = 1) -> AssignedState:
        fence = Fence(pod_uid="pod", owner_uid=owner, epoch=epoch, revision=revision)
        await self.clock.run(self.desk.assign(AssignAdaptersRequest(fence=fence, adapters=list(items))))
        await self.clock.settle()
        return self.told

    def write(self, *items: AssignedAdapter, revision: int, owner: str = OWNER, epoch: int = 1, **more: Any) -> None:
        """The operator publishes, and the kubelet has copied it."""
        self.base.file = Assignment(
            owner_uid=owner, epoch=epoch, adapters=list(items), adapters_revision=revision, **more
        )

    @property
    def told(self) -> AssignedState:
        found = self.desk.view().assigned
        assert found is not None
        return found

    def served(self) -> dict[str, str]:
        """Name → content that serves."""
        return {s.name: s.uri.rpartition("/")[2] for s in self.desk.registered() if s.state is not AdapterState.FAILED}

    def problems(self) -> dict[str, str]:
        return {p.name: p.error.code for p in self.told.problems if p.error is not None}

    async def by_hand(self, name: str, *, revision: int) -> None:
        uri = self.opener.put(f"file:///adapters/{name}/hand", "hand")
        fence = Fence(pod_uid="pod", owner_uid="cli", epoch=1, revision=revision)
        request = LoadAdapterRequest(fence=fence, source=AdapterSource(name=name, uri=uri))
        await self.clock.run(self.desk.load(request))
        await self.clock.settle()
