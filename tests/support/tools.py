"""Finds the command-line tools that tests drive.

Refuses to know what they are used for. A missing tool is built, never skipped.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tests.support.cache import kind_cache, run_script


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
