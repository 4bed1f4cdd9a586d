"""Which provider is meant: the cluster in MODELSWAP_KUBECONFIG if that is set, else kind.

Refuses to know what clusters are used for.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.cluster.existing import ExistingProvider
from tests.support.cluster.kind import KindProvider
from tests.support.cluster.provider import Provider

DEMO_CLUSTER, DEMO_PORT = "modelswap", 18080
TEST_CLUSTER, TEST_PORT = "modelswap-test", 18081


def cluster_provider() -> Provider:
    """Return the provider that the environment asks for."""
    kubeconfig = os.environ.get("MODELSWAP_KUBECONFIG")
    return ExistingProvider(Path(kubeconfig)) if kubeconfig else KindProvider()
