"""Pods of the real vLLM and SGLang on a cluster without a registry: the values that a release of the chart gets.

The sidecar has an image of its own. The engine runs in a bare Debian with Python; its packages are the machine's
environment of `hack/engines`, which nodes have mounted. Refuses to know what is installed with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.support.cluster.config import ENGINES_IN_NODE
from tests.support.engines import environment

IMAGES: Final = ("sidecar", "upstream")

# One thread, no compiler, nothing asked of the network.
_VARIABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
    "sglang": {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "none",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    },
}
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": ("--max-model-len=512", "--enforce-eager", "--kv-cache-memory-bytes=67108864"),
    "sglang": (
        "--device=cpu",
        "--attention-backend=torch_native",
        "--sampling-backend=pytorch",
        "--grammar-backend=none",
        "--context-length=512",
        "--max-total-tokens=8192",
        "--mem-fraction-static=0.3",
        "--skip-server-warmup",
        "--sleep-on-idle",
    ),
}
# Start the same servers in half the time, see there.
_QUICK: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": ("python3", "/usr/local/bin/serve_vllm.py", "--model={model}", "--distributed-executor-backend=uni"),
    "sglang": ("python3", "/usr/local/bin/serve_sglang.py", "--model-path={model}"),
}


def values_of(kind: str, *, served: str = "", options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what an engine of this kind needs; its environment is made if it is not there yet.

    With ``served``, the name of the model, the engine is started by a quicker command than the chart's own.
    """
    there = f"{ENGINES_IN_NODE}/{environment(kind).name}"
    return {
        "image": _image("sidecar"),
        "engine": {
            "kind": kind,
            "experimental": True,
            "image": _image("upstream"),
            "command": [*_QUICK[kind], f"--served-model-name={served}"] if served else [],
            "args": [*_OPTIONS[kind], *options],
            "stopSeconds": 20,
            "checkpoints": {"sizeLimit": "2Gi"},
        },
        "extraEnv": [{"name": name, "value": value} for name, value in _VARIABLES[kind].items()],
        "extraVolumes": [{"name": "engine", "hostPath": {"path": there, "type": "Directory"}}],
        "extraVolumeMounts": [{"name": "engine", "mountPath": "/opt/engine", "readOnly": True}],
        "sidecar": {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}}},
        "shm": {"sizeLimit": "256Mi"},
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
    }


def _image(name: str) -> dict[str, str]:
    return {"repository": f"modelswap/{name}", "tag": "dev", "pullPolicy": "Never"}
