"""Services of LoRAAdapters on a real API server, with the rights that the chart gives.

The pods are those of `adapter_world`: an EndpointSlice takes no loopback address, and no other leads to a process here.
What the whole operator does with one is in `test_adapters`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelswap_operator.effects import objects
from modelswap_operator.effects.events import EventWriter
from modelswap_operator.effects.kube import Kube, load_configuration
from modelswap_operator.effects.observe import Look
from modelswap_operator.runtime.adapter_reports import AdapterReports
from modelswap_operator.runtime.metrics import Metrics
from modelswap_operator.runtime.tools import Tools
from tests.api.conftest import granted
from tests.support.adapter_world import AdapterWorld
from tests.support.apiserver import ApiServer
from tests.support.custom import GROUP_VERSION, lora_adapter
from tests.support.operated import Account
from tests.support.rest import Rest

pytestmark = pytest.mark.api

NAMESPACE = "adapter-services"
ADAPTERS = f"/apis/{GROUP_VERSION}/namespaces/{NAMESPACE}/loraadapters"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
MERGE = "application/merge-patch+json"


@pytest.fixture(scope="module")
def account(definitions: ApiServer, rest: Rest, tmp_path_factory: pytest.TempPathFactory) -> Account:
    return granted(definitions, rest, tmp_path_factory.mktemp("services"), namespace=NAMESPACE)


class Led(AdapterWorld):
    """Whom Services lead to is the API server's to say here."""

    def _lead(self) -> None:
        pass


class Routes:
    """Adapters of one slot with their Services, told by the operator's own code."""

    def __init__(self, rest: Rest, kube: Kube, slot: str) -> None:
        self.rest, self.slot = rest, slot
        self.world = Led(pods=3)
        self.world.settle()
        unused: Any = None
        self.now = lambda: self.world.now
        tools = Tools(
            kube=kube,
            observer=unused,
            performer=unused,
            events=EventWriter(kube, instance="operator-0", now=self.now),
            metrics=Metrics(),
            fencing=unused,
            resync=60,
            now=self.now,
            clock=unused,
            random=unused,
        )
        self.reports = AdapterReports(tools, namespace=NAMESPACE, slot=slot, memory=self.world.memory.adapters)

    def create(self, name: str, **spec: Any) -> dict[str, Any]:
        body = lora_adapter(name, adapterName=name, modelRef={"name": self.slot}, **{"service": {}, **spec})
        body["spec"]["sources"] = [{"uri": "file:///adapters/1"}]
        return self.rest.call("POST", ADAPTERS, body).accepted()

    def patch(self, name: str, **spec: Any) -> None:
        self.rest.call("PATCH", f"{ADAPTERS}/{name}", {"spec": spec}, content=MERGE).accepted()

    async def told(self, times: int = 2) -> None:
        """Let the slot settle, and tell the API server; as often as it takes to have nothing new to say."""
        for _ in range(times):
            found = [a for a in self.rest.call("GET", ADAPTERS).accepted()["items"] if objects.slot_of(a) == self.slot]
            self.world.adapters = tuple(objects.adapter_of(body) for body in found)
            statuses = {adapter.name: adapter.status for adapter in self.world.adapters}
            self.world.rest(10)
            snapshot = self.world.snapshot()
            pods = tuple(replace(p, ip=f"10.0.0.{p.name.partition('-')[2]}") for p in snapshot.pods)
            adapters = tuple(replace(a, status=statuses[a.name]) for a in snapshot.adapters)
            versions = {body["metadata"]["name"]: body["metadata"]["resourceVersion"] for body in found}
            look = Look(
                snapshot=replace(snapshot, namespace=NAMESPACE, slot=self.slot, pods=pods, adapters=adapters),
                resource_version="",
                configmap_uid="",
                configmap_version="",
                adapter_versions=versions,
            )
            await self.reports.report(look, self.world.now)

    def service(self, name: str) -> dict[str, Any] | None:
        answer = self.rest.call("GET", f"{SERVICES}/{name}")
        return answer.body if answer.status == 200 else None

    def slices(self, service: str) -> list[dict[str, Any]]:
        query = f"{SLICES}?labelSelector=kubernetes.io/service-name%3D{service}"
        found: list[dict[str, Any]] = self.rest.call("GET", query).accepted()["items"]
        return found

    def addresses(self, service: str) -> list[str]:
        return sorted(one["addresses"][0] for part in self.slices(service) for one in part.get("endpoints") or [])

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.rest.call("GET", f"{ADAPTERS}/{name}").accepted()["status"]
        return found

    def says(self, name: str) -> tuple[str, str]:
        ready = next(c for c in self.status(name)["conditions"] if c["type"] == "Ready")
        return ready["status"], ready["reason"]

    def message(self, name: str) -> str:
        return str(next(c["message"] for c in self.status(name)["conditions"] if c["type"] == "Ready"))


@pytest.fixture
async def routes(
    definitions: ApiServer, rest: Rest, account: Account, request: pytest.FixtureRequest
) -> AsyncIterator[Routes]:
    async with Kube(await load_configuration(definitions.kubeconfig_of(account.user))) as kube:
        yield Routes(rest, kube, f"slot-{abs(hash(request.node.name)) % 10**8}")


READY = ("True", "Succeeded")


async def test_a_service_leads_to_the_pods_with_the_adapter(routes: Routes) -> None:
    thing = routes.create("exact", placement={"pods": 2}, service={"port": 80})
    await routes.told()
    assert (routes.says("exact"), routes.status("exact")["service"]) == (READY, "exact")
    service, (part,) = routes.service("exact"), routes.slices("exact")
    assert service is not None
    assert [(p["name"], p["port"]) for p in service["spec"]["ports"]] == [("http", 80)]
    assert "selector" not in service["spec"]
    for made in (service, part):
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("LoRAAdapter", thing["metadata"]["uid"], True)
    assert part["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == "modelswap.dev"
    assert [(p["name"], p["port"]) for p in part["ports"]] == [("http", 8000)]
    assert routes.addresses("exact") == ["10.0.0.1", "10.0.0.2"]
    before = (service["metadata"]["resourceVersion"], part["metadata"]["resourceVersion"])
    await routes.told()
    again, (part,) = routes.service("exact"), routes.slices("exact")
    assert again is not None
    assert (again["metadata"]["resourceVersion"], part["metadata"]["resourceVersion"]) == before
    routes.world.pods[1].reachable = False  # the operator cannot ask it: nobody knows that it does not serve
    await routes.told()
    assert routes.addresses("exact") == ["10.0.0.1", "10.0.0.2"]
    routes.world.pods[0].ready = False
    await routes.told()
    assert routes.addresses("exact") == ["10.0.0.2"]
    routes.world.pods[1].ready = False
    await routes.told()
    assert routes.slices("exact") == []
    assert routes.service("exact") is not None


async def test_pods_that_are_to_lose_it_do_so_once_the_service_leads_to_them_no_more(routes: Routes) -> None:
    routes.create("shrunk", placement={"pods": 3})
    await routes.told()
    assert routes.addresses("shrunk") == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    routes.patch("shrunk", placement={"pods": 1})
    await routes.told(times=1)  # ten seconds of passes, then the EndpointSlice
    assert routes.addresses("shrunk") == ["10.0.0.1"]
    assert routes.world.loaded() == [{"shrunk": "1"}] * 3
    await routes.told(times=1)
    assert routes.world.loaded() == [{"shrunk": "1"}, {}, {}]
    assert routes.says("shrunk") == READY


async def test_what_is_not_asked_for_any_more_is_taken_away(routes: Routes) -> None:
    routes.create("moved")
    await routes.told()
    routes.patch("moved", service={"name": "elsewhere"})
    await routes.told()
    assert (routes.service("moved"), routes.slices("moved")) == (None, [])
    assert routes.addresses("elsewhere") == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    routes.patch("moved", service=None)
    await routes.told()
    assert (routes.service("elsewhere"), routes.slices("elsewhere")) == (None, [])
    assert "service" not in routes.status("moved")


async def test_what_is_somebody_elses_is_left_alone_and_named(routes: Routes, rest: Rest) -> None:
    body = {"metadata": {"name": "theirs"}, "spec": {"selector": {"app": "x"}, "ports": [{"port": 80}]}}
    before = rest.call("POST", SERVICES, body).accepted()
    routes.create("theirs")
    routes.create("one", service={"name": "two"})
    routes.create("two")
    await routes.told()
    assert routes.says("theirs") == ("False", "ServiceTaken")
    assert "Service theirs was not made for a LoRAAdapter" in routes.message("theirs")
    assert routes.service("theirs") == before
    assert routes.says("one") == READY  # it comes first
    assert routes.says("two") == ("False", "ServiceTaken")
    assert "belongs to LoRAAdapter one" in routes.message("two")
    rest.call("DELETE", f"{SERVICES}/theirs").accepted()
    routes.patch("one", service=None)
    await routes.told()
    await routes.told()
    assert (routes.says("theirs"), routes.says("two")) == (READY, READY)
    assert len(routes.addresses("theirs")) == 3


async def test_what_others_change_in_it_is_put_right(routes: Routes, rest: Rest) -> None:
    routes.create("mended")
    await routes.told()
    (part,) = routes.slices("mended")
    change = {"spec": {"selector": {"app": "all"}, "ports": [{"name": "http", "port": 1}]}}
    rest.call("PATCH", f"{SERVICES}/mended", change, content=MERGE).accepted()
    path = f"{SLICES}/{part['metadata']['name']}"
    rest.call("PATCH", path, {"endpoints": [{"addresses": ["10.9.9.9"]}]}, content=MERGE).accepted()
    await routes.told()
    service = routes.service("mended")
    assert service is not None
    assert ("selector" in service["spec"], service["spec"]["ports"][0]["port"]) == (False, 8000)
    assert routes.addresses("mended") == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    for thing in (f"{SERVICES}/mended", path):
        rest.call("PATCH", thing, {"metadata": {"labels": None}}, content=MERGE).accepted()
    await routes.told()
    assert routes.addresses("mended") == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


async def test_a_recreated_adapter_takes_its_service_over(routes: Routes, rest: Rest) -> None:
    first = routes.create("again")
    await routes.told()
    rest.call("DELETE", f"{ADAPTERS}/again").accepted()
    second = routes.create("again")
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    await routes.told()
    service, (part,) = routes.service("again"), routes.slices("again")
    assert service is not None
    assert (routes.says("again"), len(routes.addresses("again"))) == (READY, 3)
    owners = [thing["metadata"]["ownerReferences"][0]["uid"] for thing in (service, part)]
    assert owners == [second["metadata"]["uid"]] * 2


async def test_without_the_right_to_it_says_so(
    definitions: ApiServer, rest: Rest, account: Account, tmp_path: Path
) -> None:
    async with Kube(await load_configuration(definitions.kubeconfig_of("somebody"))) as kube:
        bound = {
            "metadata": {"name": "somebody"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "somebody"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "somebody"}],
        }
        rules = [{"apiGroups": ["modelswap.dev"], "resources": ["loraadapters/status"], "verbs": ["patch"]}]
        home = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
        rest.call("POST", f"{home}/roles", {"metadata": {"name": "somebody"}, "rules": rules}).accepted()
        rest.call("POST", f"{home}/rolebindings", bound).accepted()
        routes = Routes(rest, kube, "forbidden")
        routes.create("refused")
        await routes.told()
        assert routes.says("refused") == ("False", "ServiceRefused")
        assert "rbac.adapterServices" in routes.message("refused")
