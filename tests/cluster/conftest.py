"""The test cluster as it comes, without anything of ours in it. The end-to-end tests, which follow, remove it."""

from __future__ import annotations

import pytest

from tests.support.cluster.provider import Cluster
from tests.support.cluster.select import TEST_CLUSTER, TEST_PORT, cluster_provider


@pytest.fixture(scope="session")
def bare_cluster() -> Cluster:
    """Return the test cluster, running."""
    return cluster_provider().ensure(name=TEST_CLUSTER, data_port=TEST_PORT)
