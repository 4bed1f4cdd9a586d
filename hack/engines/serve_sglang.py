"""SGLang's own server for tests: its processes are forked after the imports, which halves the time of a start.

python serve_sglang.py --model-path DIR --port N ...        (the arguments of `python -m sglang.launch_server`)
"""

import multiprocessing
import os
import sys

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "none",  # torch is a CUDA build: SGLang would look for NCCL, and fail
    "TORCH_COMPILE_DISABLE": "1",  # a split model would be compiled in part, which hangs in forked processes
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # /health answers at once, also while paused
}


def _fork_always() -> None:
    """Overrule the start method that SGLang sets."""
    choose = multiprocessing.set_start_method

    def forked(_method: str | None, force: bool = False) -> None:
        choose("fork", force)

    multiprocessing.set_start_method = forked  # type: ignore[assignment]


def main(arguments: list[str]) -> None:
    """Serve until the process is told to end."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from sglang.launch_server import run_server  # after the environment, which the imports read
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    _fork_always()
    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
