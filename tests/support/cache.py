"""Where the tests' programs and big files are cached, and how the scripts that make them are run.

Refuses to know what is built: `hack/` does. A missing piece is built, never skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HACK = REPOSITORY / "hack"


def cache_root() -> Path:
    """Return the folder of everything that can be made again: MODELSWAP_CACHE, or one in the user's cache."""
    return Path(os.environ.get("MODELSWAP_CACHE") or Path.home() / ".cache" / "modelswap").absolute()


def kind_cache() -> Path:
    """Return the folder of the cluster's programs, images and kubeconfigs."""
    return cache_root() / "kind"


def run_script(path: str, *arguments: str) -> None:
    """Run a script of `hack/` with its progress on this process's output; raise where it fails."""
    script = HACK / path
    done = subprocess.run([str(script), *arguments], check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"hack/{path} {' '.join(arguments)} ended with status {done.returncode}; "
            f"its output above says why, the logs are in {kind_cache() / 'logs'}"
        )


def kube_binaries(*commands: str) -> Path:
    """Return a folder with Kubernetes' commands: KUBEBUILDER_ASSETS, else the cache, built if missing."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        folder = Path(assets)
        lacking = [name for name in commands if not (folder / name).exists()]
        if lacking:
            raise RuntimeError(f"KUBEBUILDER_ASSETS={folder} lacks {', '.join(lacking)}; unset it to build them")
        return folder
    run_script("kind/kube-binaries.sh", *commands)
    return kind_cache() / "kube" / "bin"
