"""When a pod that is to lose an adapter does: what the API server took of its Service, and when it did."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from modelswap_operator.api.loraadapter import Placement, ServiceSpec
from modelswap_operator.effects.events import EventWriter
from modelswap_operator.effects.kube import ApiError
from modelswap_operator.effects.observe import Look
from modelswap_operator.runtime.adapter_memory import LED_AWAY
from modelswap_operator.runtime.adapter_reports import AdapterReports
from modelswap_operator.runtime.metrics import Metrics
from modelswap_operator.runtime.tools import Tools
from tests.support.adapter_world import AdapterWorld

STEP = timedelta(seconds=1)


class Shelf:
    """Stands for an API server that refuses, or takes its time on a clock that tests set: no real one does."""

    def __init__(self, world: Reported) -> None:
        self._world = world
        self.bodies: dict[str, dict[str, Any]] = {}
        self.refuses: tuple[str, ...] = ()
        self.takes = timedelta()

    async def list(self, path: str, *, label_selector: str) -> list[dict[str, Any]]:
        assert label_selector
        self._asked("list", path)
        return [body for key, body in self.bodies.items() if key.startswith(f"{path}/")]

    async def create(self, path: str, body: dict[str, Any]) -> None:
        self._asked("create", path)
        self._keep(f"{path}/{body['metadata'].get('name')}", body)

    async def merge(self, path: str, body: dict[str, Any]) -> None:
        self._asked("merge", path)
        self._keep(path, {**self.bodies[path], **body})

    async def apply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._world.status_applied(body["metadata"]["name"], body["status"].get("service", ""))
        return body

    def _keep(self, path: str, body: dict[str, Any]) -> None:
        self.bodies[path] = {**body, "metadata": {**body["metadata"], "resourceVersion": "1", "uid": path}}

    def _asked(self, verb: str, path: str) -> None:
        if verb in self.refuses:
            raise ApiError(verb=verb, path=path, status=403, message="forbidden")
        if verb == "merge":
            self._world.now += self.takes

    @property
    def leads_to(self) -> set[str]:
        slices = (body for path, body in self.bodies.items() if "/endpointslices/" in path)
        return {one["targetRef"]["name"] for body in slices for one in body["endpoints"]}


class Reported(AdapterWorld):
    """The operator's own reports bring the Services about, and say whom they lead to."""

    def __init__(self, *refuses: str) -> None:
        self.shelf = Shelf(self)
        super().__init__(pods=3)
        kube: Any = self.shelf
        unused: Any = None
        tools = Tools(
            kube=kube,
            observer=unused,
            performer=unused,
            events=EventWriter(kube, instance="operator-0", now=lambda: self.now),
            metrics=Metrics(),
            fencing=unused,
            resync=60,
            now=lambda: self.now,
            clock=unused,
            random=unused,
        )
        self.reports = AdapterReports(tools, namespace="default", slot="slot", memory=self.memory.adapters)
        self.settle()
        self.shelf.refuses = refuses
        self.create("a", pods=3, service=ServiceSpec())
        self.settle()

    def status_applied(self, name: str, service: str) -> None:
        (adapter,) = self.adapters
        assert adapter.name == name
        self._put(name, lambda a: replace(a, status=msgspec.structs.replace(a.status, service=service)))

    def _lead(self) -> None:
        versions = {adapter.name: "1" for adapter in self.adapters}
        look = Look(
            snapshot=self.snapshot(),
            resource_version="",
            configmap_uid="",
            configmap_version="",
            adapter_versions=versions,
        )
        asyncio.run(self.reports.report(look, self.now))

    @property
    def having(self) -> set[str]:
        return {pod.name for pod, names in zip(self.pods, self.loaded(), strict=True) if "a" in names}


@pytest.mark.parametrize("refused", ["list", "merge"])
def test_while_its_service_cannot_be_written_a_pod_that_is_led_to_keeps_the_adapter(refused: str) -> None:
    made = Reported()
    assert made.shelf.leads_to == made.having == {"pod-1", "pod-2", "pod-3"}
    made.shelf.refuses = (refused,)
    made.change("a", placement=Placement(pods=1))
    made.rest(120)
    assert made.shelf.leads_to == made.having == {"pod-1", "pod-2", "pod-3"}
    made.shelf.refuses = ()
    made.rest(120)
    assert made.shelf.leads_to == made.having == {"pod-1"}


@pytest.mark.parametrize("refused", ["list", "create"])
def test_where_no_service_could_ever_be_made_it_leaves(refused: str) -> None:
    made = Reported(refused)
    made.change("a", placement=Placement(pods=1))
    made.rest(120)
    assert (made.shelf.leads_to, made.having) == (set(), {"pod-1"})


def test_the_wait_begins_when_the_write_has_ended() -> None:
    made = Reported()
    made.shelf.takes = 4 * LED_AWAY
    made.change("a", placement=Placement(pods=1))
    while made.shelf.leads_to != {"pod-1"}:
        made.run_pass()
    written = made.now
    made.shelf.takes = timedelta()
    while made.having != {"pod-1"}:
        made.run_pass()
        if any(pod.loading for pod in made.pods):
            made.tick()
        made.now += STEP
    assert made.now - written >= LED_AWAY
