"""What a kind cluster is made of, as data, and the text that kind reads. Pure.

Refuses to run anything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.provider import DATA_NODE_PORT

SITE_IN_NODE = "/opt/modelswap/site"
"""Where nodes have the engine's third-party packages, and pods mount them from."""
ENGINES_IN_NODE = "/opt/modelswap/engines"
"""Where nodes have the environments of the real engines (`hack/engines`), and pods mount one from."""
MODELS_IN_NODE = "/models"
"""Where nodes have the checkpoints of tests and demo."""

# The kubelet of 1.36 refuses hosts with cgroup v1 unless told otherwise; on v2 this says nothing.
# A pod sees another ConfigMap in its mount within the sync's period, a minute unless told otherwise. No swap waits for
# it, but pods that an object gives up and another takes over do. Nor is there anything to be learnt from the seconds in
# which a container that a test has killed is not started again.
_KUBELET_PATCH = """\
kind: KubeletConfiguration
apiVersion: kubelet.config.k8s.io/v1beta1
failCgroupV1: false
syncFrequency: 10s
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
"""
# Not the usual 10.96.0.0/16: on some machines another kube-proxy has that one.
_SERVICE_SUBNET = "10.97.0.0/16"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindConfig:
    """Everything that decides whether a running cluster is the one asked for."""

    image: str
    nodes: int
    data_port: int
    site: Path
    engines: Path
    models: Path

    def render(self) -> str:
        """Return kind's configuration, as JSON (which is YAML)."""
        mounts = [
            {"hostPath": str(self.site), "containerPath": SITE_IN_NODE, "readOnly": True},
            {"hostPath": str(self.engines), "containerPath": ENGINES_IN_NODE, "readOnly": True},
            {"hostPath": str(self.models), "containerPath": MODELS_IN_NODE},
        ]
        ports = [{"containerPort": DATA_NODE_PORT, "hostPort": self.data_port, "listenAddress": "127.0.0.1"}]
        nodes: list[dict[str, object]] = [
            {"role": "control-plane", "extraMounts": mounts, "extraPortMappings": ports},
        ]
        nodes += [{"role": "worker", "extraMounts": mounts}] * (self.nodes - 1)
        return json.dumps(
            {
                "kind": "Cluster",
                "apiVersion": "kind.x-k8s.io/v1alpha4",
                "networking": {"serviceSubnet": _SERVICE_SUBNET},
                "kubeadmConfigPatches": [_KUBELET_PATCH],
                "nodes": nodes,
            },
            indent=1,
        )

    def key(self) -> str:
        """Return a short text that differs when a cluster of this configuration would."""
        return hashlib.sha256(f"{self.image}\n{self.render()}".encode()).hexdigest()[:16]
