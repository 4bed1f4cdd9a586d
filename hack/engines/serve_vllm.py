"""Starts vLLM's own API server for tests, with its processes forked instead of spawned: half the start-up time.

On CPU vLLM spawns each process, and each imports everything once more. Nothing else differs from ``vllm serve``; the
variables below are only set where the caller has not.
"""

import os
from multiprocessing import resource_tracker
from typing import Any

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
}


def fork_workers() -> None:
    """Undo the platform's choice of spawning, right after it makes it."""
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found]

    chosen = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        chosen(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check)


def main() -> None:
    """Serve until told to end; the arguments are vLLM's."""
    os.environ.update({name: value for name, value in DEFAULTS.items() if name not in os.environ})
    from vllm.entrypoints.launchers.api_server.entry import main as serve  # type: ignore[import-not-found]

    fork_workers()
    resource_tracker.ensure_running()  # before the first fork, so that one process cleans up for all
    serve()


if __name__ == "__main__":
    main()
