"""Finds the command-line tools that tests drive.

Refuses to know what they are used for. A missing tool is built, never skipped.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from tests.support.cache import kind_cache, run_script


@functools.cache
def helm() -> Path:
    """Return Helm: the cache's, else the one on PATH, else one built from its Go module."""
    cached = kind_cache() / "bin" / "helm"
    if cached.exists():
        return cached
    if installed := shutil.which("helm"):
        return Path(installed)
    run_script("kind/tools.sh", "helm")
    return cached
