"""A commit changes running pods: Flux and Argo CD say that it is done when it is, and fail where it was refused.

The controllers are the real ones and follow a git repository; the pods are those of the other tests of this folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.git_server import GitServer
from tests.support.gitops import Controller, Health, wait_for
from tests.support.gitops_argo import argo_cd
from tests.support.gitops_flux import flux
from tests.support.gitops_steps import assert_left_alone, digest_of, identity, manifest, proved
from tests.support.stack import Slot

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[GitServer]:
    server = GitServer(tmp_path)
    yield server
    server.close()


def test_flux(applied_slot: Slot, repository: GitServer, tmp_path: Path) -> None:
    first = repository.push("serve 1.0", model=manifest(applied_slot, "1.0", "v1"))
    folder = tmp_path / "flux"
    with flux(
        applied_slot.cluster, folder, url=repository.url, slot=applied_slot.name, namespace=applied_slot.namespace
    ) as kustomization:
        there_and_back(applied_slot, repository, kustomization, first)
    assert_left_alone(applied_slot)


@pytest.mark.full  # its controllers take long to build
def test_argo_cd(applied_slot: Slot, repository: GitServer, tmp_path: Path) -> None:
    first = repository.push("serve 1.0", model=manifest(applied_slot, "1.0", "v1"))
    folder = tmp_path / "argo"
    with argo_cd(applied_slot.cluster, folder, url=repository.url, namespace=applied_slot.namespace) as application:
        there_and_back(applied_slot, repository, application, first)
        a_later_wave_waits(applied_slot, repository, application)
    assert_left_alone(applied_slot)


def a_later_wave_waits(slot: Slot, repository: GitServer, application: Controller) -> None:
    """What is in a sync wave after the version is applied with one that the pods take, never with one they refuse."""

    def push(version: str, model: str) -> str:
        annotations = {"argocd.argoproj.io/sync-wave": "1"}
        metadata = {"name": "told", "namespace": slot.namespace, "annotations": annotations}
        told = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"version": version}}
        return repository.push(f"tell of {version}", model=manifest(slot, version, model), told=yaml.safe_dump(told))

    def told() -> str:
        place = ("-n", slot.namespace, "get", "configmap", "told", "--ignore-not-found")
        return slot.cluster.kubectl(*place, "-o", "jsonpath={.data.version}")

    follow(slot, application, commit=push("2.0", "v2"), verdict=application.good)
    assert told() == "2.0"
    follow(slot, application, commit=push("2.1", "flipped"), verdict="OutOfSync/Degraded")
    assert told() == "2.0"
    follow(slot, application, commit=repository.revert(), verdict=application.good)


def there_and_back(slot: Slot, repository: GitServer, controller: Controller, first: str) -> None:
    """Good, better, bad, and the revert of the bad one; at the end as at the beginning."""
    before = identity(slot.pods())
    good = {version: digest_of(slot, model) for version, model in (("1.0", "v1"), ("1.1", "v2"))}
    follow(slot, controller, commit=first, verdict=controller.good)
    better = repository.push("serve 1.1", model=manifest(slot, "1.1", "v2"))
    said = follow(slot, controller, commit=better, verdict=controller.good)
    assert controller.busy in {health.verdict for health in said}, "it never said that the swap was under way"
    assert proved(slot) == {good["1.1"]}

    bad = repository.push("serve 1.2, whose bytes were damaged on the way", model=manifest(slot, "1.2", "flipped"))
    follow(slot, controller, commit=bad, verdict=controller.bad)
    assert slot.condition("Serving")["status"] == "True"
    assert proved(slot) == {good["1.1"]}

    follow(slot, controller, commit=repository.revert(), verdict=controller.good)
    follow(slot, controller, commit=repository.revert_to(first), verdict=controller.good)
    assert proved(slot) == {good["1.0"]}
    assert identity(slot.pods()) == before

    settled = slot.get()["metadata"]
    controller.refresh()
    follow(slot, controller, commit=repository.head(), verdict=controller.good)
    assert slot.get()["metadata"]["generation"] == settled["generation"], "what is in the cluster differs from Git"
    assert controller.applied() == [f"ModelVersion/{slot.name}"]
    assert marks(settled), "the controller marks what is its own"
    name = f"modelswap-{slot.name}"
    found = slot.cluster.kubectl("-n", slot.namespace, "get", "configmap", name, "-o", "json")
    assert not marks(settled) & marks(json.loads(found)["metadata"])


def marks(metadata: dict[str, Any]) -> set[str]:
    """Return the keys of labels and annotations."""
    return {*metadata.get("labels", {}), *metadata.get("annotations", {})}


def follow(slot: Slot, controller: Controller, *, commit: str, verdict: str) -> list[Health]:
    """Follow a pushed commit to its end. A good word of it must be true at that moment."""
    said: list[Health] = []

    def seen(health: Health) -> None:
        said.append(health)
        if (health.commit, health.verdict) == (commit, controller.good):
            found = slot.get()
            assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
            assert slot.condition("Ready")["status"] == "True"

    controller.refresh()
    wait_for(controller, commit=commit, verdict=verdict, seen=seen)
    return said
