"""Folders that are made once: named by what they were made from, complete or absent, never half written.

Knows nothing of what is in them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_MARK = ".made-from"


def key_of(*parts: str | bytes | Path) -> str:
    """Return a short text that differs when any of the parts does; of a path, its content counts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def is_made(folder: Path, key: str) -> bool:
    """Say whether the folder is there and was made from what the key stands for."""
    mark = folder / _MARK
    return mark.exists() and mark.read_text() == key


def make(folder: Path, key: str, build: Callable[[Path], None]) -> bool:
    """Make the folder unless it is made; return whether it had to be.

    Two processes may ask at once: one builds, the other waits. The result is readable by every user, since
    pods run as another one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_made(folder, key):
            return False
        unfinished = folder.parent / f".{folder.name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            build(unfinished)
            _open_to_all(unfinished)
            (unfinished / _MARK).write_text(key)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        return True


def _open_to_all(folder: Path) -> None:
    folder.chmod(0o755)
    for parent, directories, files in os.walk(folder):
        for name in directories:
            (Path(parent) / name).chmod(0o755)
        for name in files:
            (Path(parent) / name).chmod(0o644)
