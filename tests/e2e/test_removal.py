"""What is taken away ends by itself: the operator's release, and a namespace in the middle of a swap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.asking import Question, ask_once
from tests.support.cluster.provider import Cluster
from tests.support.gitops_steps import digest_of, identity, proved
from tests.support.operator_release import OPERATOR_NAMESPACE, install_operator
from tests.support.reaching import WAIT, port_forward
from tests.support.stack import Slot

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture
def leaving(cluster: Cluster, models: Path) -> Iterator[Slot]:
    """A pod of its own on 1.1, with an adapter."""
    slot = Slot(cluster, name="leaving", models=models)
    slow = {"MODELSWAP_FAULT": "stage:delay=2"}  # so that there is a middle of a swap
    slot.install(replicas=1, model="v1", version="1.0", env=slow, arguments=["--lora-slots=1", "--lora-max-rank=8"])
    slot.wait_ready(slot.apply("1.1", "v2"))
    slot.apply_adapter("letters", {"uri": f"file://{slot.inside('adapters/K')}"})
    yield slot
    slot.uninstall(wait=False)


async def test_pods_serve_on_without_the_operator_and_a_namespace_goes_with_all_in_it(leaving: Slot) -> None:
    cluster, before = leaving.cluster, identity(leaving.pods())
    (pod,) = leaving.pods().values()
    with leaving.control(pod) as control:  # the account whose token this is goes with the release
        cluster.helm("uninstall", "modelswap", "--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout=2m")
        try:
            assert control.check().digest == digest_of(leaving, "v2")
            with port_forward(cluster, namespace=leaving.namespace, pod=pod.name, port=8000) as url:
                assert set((await ask_once(url, Question(model="letters", max_tokens=8))).text) == {"K"}
            bumped = leaving.apply("1.2", "v3")
            assert leaving.get()["status"]["observedGeneration"] < bumped  # kept, and nobody looks at it
        finally:
            install_operator(cluster)
    leaving.wait_ready(bumped)
    assert proved(leaving) == {digest_of(leaving, "v3")}
    assert identity(leaving.pods()) == before

    leaving.apply("1.3", "v4")
    leaving.swapping_pod()
    cluster.kubectl("delete", "namespace", leaving.namespace, WAIT)  # ends when it is gone
