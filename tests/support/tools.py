"""Finds the command-line tools that tests drive.

Refuses to know what they are used for. A missing tool is built, never skipped.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from tests.support.cache import cache_root, kind_cache, run_script


@functools.cache
def helm() -> Path:
    """Return Helm in the version that is pinned, built from its Go module where the cache lacks it."""
    run_script("kind/tools.sh", "helm")
    return kind_cache() / "bin" / "helm"


@functools.cache
def promtool() -> Path:
    """Return Prometheus' promtool, built from its Go module where the cache lacks it: minutes."""
    run_script("promtool/build.sh")
    return kind_cache() / "bin" / "promtool"


@functools.cache
def source_server(name: str) -> Path:
    """Return a server that versions are read from, built or installed where it is missing."""
    run_script("servers/build.sh", name)
    if name == "nginx":  # of the machine; Debian keeps it where not every PATH looks
        return Path(shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") or f"/usr/sbin/{name}")
    return cache_root() / "servers" / "bin" / name
