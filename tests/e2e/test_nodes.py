"""Nodes that go and come back, addresses that another pod has by then, and mounts that hang, on nodes of their own.

A test may take these nodes away, so no other test shares them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo.answers import mixed_by_text
from demo.load import Load
from modelswap_engine.checkpoint.manifest import MANIFEST_FILE, decode
from modelswap_engine.protocol.codec import decode_error
from modelswap_engine.protocol.errors import WrongPod
from tests.support.cluster.kind import KindCluster, KindProvider
from tests.support.cluster.provider import DATA_NODE_PORT
from tests.support.hung_mount import hung_mount
from tests.support.models import LOWER, UPPER
from tests.support.operator_release import install_operator
from tests.support.pod import Pod
from tests.support.reaching import WAIT
from tests.support.stack import Slot, build_images, embedded_values

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1200)]

_NAME, _PORT = "modelswap-nodes", 18083
_KEPT, _LOST = f"{_NAME}-control-plane", f"{_NAME}-worker"
_HUNG = "/hung"


@pytest.fixture(scope="module")
def nodes() -> Iterator[KindCluster]:
    """Two nodes that take pods; the operator is on the one that stays."""
    cluster = KindProvider().ensure(name=_NAME, nodes=2, data_port=_PORT)
    cluster.try_kubectl("taint", "nodes", _KEPT, "node-role.kubernetes.io/control-plane-")
    build_images(cluster)
    install_operator(cluster, f"nodeSelector.kubernetes\\.io/hostname={_KEPT}")
    yield cluster
    if not os.environ.get("MODELSWAP_KEEP"):
        cluster.delete()


def on_each_node() -> dict[str, Any]:
    """Return the values of engine pods that are on different nodes, and see what is mounted below a folder later."""
    found = embedded_values({})
    volume = {"name": "hung", "hostPath": {"path": _HUNG, "type": "DirectoryOrCreate"}}
    mount = {"name": "hung", "mountPath": _HUNG, "readOnly": True, "mountPropagation": "HostToContainer"}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"modelswap.dev/slot": "spread"}},
        "matchLabelKeys": ["pod-template-hash"],  # what an earlier run left does not count
    }
    return found | {
        "topologySpreadConstraints": [spread],
        "allowedRoots": ["/models", _HUNG],
        "extraVolumes": [*found["extraVolumes"], volume],
        "extraVolumeMounts": [*found["extraVolumeMounts"], mount],
    }


@pytest.fixture(scope="module")
def slot(nodes: KindCluster, models: Path) -> Iterator[Slot]:
    """A pod on each node."""
    slot = Slot(nodes, name="spread", models=models)
    slot.install(replicas=2, model="v1", version="1.0", node_port=DATA_NODE_PORT, engine=on_each_node())
    yield slot
    slot.uninstall(wait=bool(os.environ.get("MODELSWAP_KEEP")))  # else the cluster goes next


@pytest.fixture
def pods(slot: Slot) -> dict[str, Pod]:
    """The pods by their node, both on 1.0."""
    slot.wait_ready(slot.apply("1.0", "v1"))
    found = {pod.node: pod for pod in slot.pods().values()}
    assert set(found) == {_KEPT, _LOST}
    return found


def digest(slot: Slot, model: str) -> str:
    return decode((slot.models / model / MANIFEST_FILE).read_bytes()).digest


def worst(slot: Slot) -> dict[str, Any]:
    """Return what status says of the pod that needs attention most."""
    found: dict[str, Any] = slot.get()["status"]["pods"][0]
    return found


def wait_node(nodes: KindCluster, ready: str) -> None:
    nodes.kubectl("wait", f"node/{_LOST}", f"--for=condition=Ready={ready}", WAIT)


def test_a_node_that_goes_away_holds_up_no_other_and_its_pod_follows_when_it_is_back(
    nodes: KindCluster, slot: Slot, pods: dict[str, Pod]
) -> None:
    kept, lost = pods[_KEPT], pods[_LOST]
    with ExitStack() as away:
        away.enter_context(nodes.lost(_LOST))
        wait_node(nodes, "Unknown")
        nodes.kubectl("-n", slot.namespace, "wait", f"pod/{lost.name}", "--for=condition=Ready=False", WAIT)
        slot.apply("1.2", "v3")  # one pod at most may be unavailable, and one is
        slot.wait_field("{.status.rollout.stagedPods}=1")
        slot.wait_field("{.status.pods[0].state}=Unreachable")
        live = slot.state(kept).live  # it holds what it staged, and gives way to no check
        assert live is not None
        assert live.digest == digest(slot, "v1")
        generation = slot.apply("1.2", "v3", rollout={"maxUnavailable": 2})
        slot.wait_field('{.status.versions[?(@.version=="1.2")].pods}=1')
        slot.wait_engine(kept.name, digest(slot, "v3"))
        told, ready = worst(slot), slot.condition("Ready")
        assert (told["name"], told["uid"], told["state"]) == (lost.name, lost.uid, "Unreachable")
        assert f"on node {_LOST}: " in told["message"]
        assert ready["status"] != "True"
        assert lost.name in ready["message"]
        with slot.watch() as objects:
            away.close()
            ended = next(status for status in map(status_of, objects) if is_ready(status))
    assert [(v["version"], v["pods"]) for v in ended["versions"]] == [("1.2", 2)]
    slot.wait_ready(generation)
    back = slot.pods()[lost.name]
    assert (back.uid, back.restarts) == (lost.uid, lost.restarts), "it is the process that was away"
    assert slot.check(back).digest == digest(slot, "v3")


def status_of(found: dict[str, Any]) -> dict[str, Any]:
    status: dict[str, Any] = found.get("status", {})
    return status


def is_ready(status: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))


@pytest.fixture(scope="module")
def foreign(nodes: KindCluster, models: Path) -> Iterator[Slot]:
    """A pod of another slot, on the node whose addresses are given again."""
    slot = Slot(nodes, name="foreign", models=models)
    engine = embedded_values({}) | {"nodeSelector": {"kubernetes.io/hostname": _LOST}}
    slot.install(replicas=1, model="v1", version="1.0", engine=engine)
    slot.wait_ready(slot.apply("1.0", "v1"))
    yield slot
    slot.uninstall(wait=bool(os.environ.get("MODELSWAP_KEEP")))


def only(slot: Slot) -> Pod:
    (pod,) = slot.pods().values()
    return pod


def reborn_at(nodes: KindCluster, slot: Slot, address: str) -> Pod:
    """Replace the slot's only pod by one that gets an address which is free on its node, and return it."""
    before = ipaddress.ip_address(address) - 1
    state = 'for f in /run/cni-ipam-state/*/last_reserved_ip.0; do printf %s "$1" >$f; done'
    nodes.on_node(_LOST, "sh", "-c", state, "sh", str(before))
    slot.delete_pod(only(slot).name)
    slot.wait_pods()
    slot.wait_condition("Ready")
    pod = only(slot)
    assert pod.ip == address
    return pod


def refused_as_wrong(slot: Slot, pod: Pod, *, meant: Pod) -> None:
    """See that a pod refuses what the operator would send to another one that had this address."""
    with slot.control(replace(pod, uid=meant.uid)) as control, pytest.raises(urllib.error.HTTPError) as caught:
        control.check()
    assert caught.value.code == 421
    error = decode_error(caught.value.read())
    assert isinstance(error, WrongPod)
    assert error.details == {"expected": meant.uid, "actual": pod.uid}


def test_who_has_the_address_of_a_pod_that_ended_is_left_alone(
    nodes: KindCluster, slot: Slot, foreign: Slot, pods: dict[str, Pod]
) -> None:
    ended = pods[_LOST]
    patch = json.dumps({"spec": {"activeDeadlineSeconds": 1}})  # fails it, and its object stays with its address
    nodes.kubectl("-n", slot.namespace, "patch", "pod", ended.name, "--type=merge", f"--patch={patch}")
    nodes.kubectl("-n", slot.namespace, "wait", f"pod/{ended.name}", "--for=jsonpath={.status.phase}=Failed", WAIT)
    slot.wait_pods()
    there = reborn_at(nodes, foreign, ended.ip)
    assert slot.pods()[ended.name].ip == there.ip, "two pods of the API server have one address"
    before = foreign.state(there)
    slot.wait_ready(slot.apply("1.3", "v4"))
    refused_as_wrong(foreign, there, meant=ended)
    assert foreign.state(there) == before
    slot.delete_pod(ended.name)


def test_who_has_the_address_that_a_stopped_kubelet_still_tells_is_left_alone(
    nodes: KindCluster, slot: Slot, foreign: Slot, pods: dict[str, Pod]
) -> None:
    kept, lost, there = pods[_KEPT], pods[_LOST], only(foreign)
    before = foreign.state(there)
    nodes.on_node(_LOST, "systemctl", "stop", "kubelet")
    try:
        # As after a start of the node that gave the pods each other's addresses.
        stale = json.dumps({"status": {"podIP": there.ip, "podIPs": [{"ip": there.ip}]}})
        nodes.kubectl(
            "-n", slot.namespace, "patch", "pod", lost.name, "--subresource=status", "--type=merge", f"--patch={stale}"
        )
        generation = slot.apply("1.4", "v2")
        slot.wait_field('{.status.versions[?(@.version=="1.4")].pods}=1')
        slot.wait_field("{.status.pods[0].state}=Unreachable")
        told = worst(slot)
        assert told["name"] == lost.name
        assert told["message"].startswith(f"WrongPod: on node {_LOST}: the token is for the pod with UID {lost.uid}")
        assert slot.condition("Ready")["reason"] == "WrongPod"
        assert slot.check(kept).digest == digest(slot, "v2")
    finally:
        nodes.on_node(_LOST, "systemctl", "start", "kubelet")
    slot.wait_ready(generation)
    assert slot.pods()[lost.name].uid == lost.uid
    assert foreign.state(there) == before


async def test_a_mount_that_hangs_is_named_and_the_pods_serve_on(
    nodes: KindCluster, slot: Slot, pods: dict[str, Pod]
) -> None:
    load = Load(nodes.data_url, model=slot.name, streams=2, max_tokens=8, mixed=mixed_by_text(LOWER, UPPER))
    with hung_mount(nodes, node=_KEPT, folder=_HUNG) as one, hung_mount(nodes, node=_LOST, folder=_HUNG):
        uri = f"file://{one}/v2"
        async with load:
            source = {"uri": uri}
            rollout = {"progressDeadlineSeconds": 15}
            await asyncio.to_thread(slot.apply, "2.0", "v2", source=source, rollout=rollout)
            await asyncio.to_thread(slot.wait_condition, "Stalled")
            told = slot.condition("Stalled")
            assert told["reason"] == "ProgressDeadlineExceeded"
            assert told["message"].startswith("no progress for 15 s: ")
            assert told["message"].endswith(f" is reading {uri}")
            for pod in pods.values():
                assert (await asyncio.to_thread(slot.check, pod)).digest == digest(slot, "v1")
            await load.served_more(3)
            generation = await asyncio.to_thread(slot.apply, "2.1", "v2")
            await asyncio.to_thread(slot.wait_ready, generation)
            await load.served_more(3)
    summary = load.summary()
    assert (summary.mixed, summary.failed) == (0, 0), summary.lines()
