"""What sidecar and launcher tell each other, as two files of a memory volume that both containers mount.

``launch.json``   the sidecar: this checkpoint is whole, an engine may start on it
``engine.json``   the launcher: this start of the engine has this boot id and this admin key

Both are written beside and renamed, readable by their user alone, and believed only when that user wrote them. Only the
standard library: the launcher runs with the Python of the engine's image.
"""

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

LAUNCH_FILE: Final = "launch.json"
ENGINE_FILE: Final = "engine.json"
_MAX_BYTES: Final = 65536

T = TypeVar("T", "Launch", "Boot")


class UntrustedError(Exception):
    """A file that somebody else could have written, or that does not have the required form."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What an engine may start on: the path of a whole checkpoint, and its digest."""

    model: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Boot:
    """One start of the engine: its random boot id, the key of its admin routes, where it listens, what it loaded."""

    boot_id: str
    admin_key: str
    engine: str
    port: int
    digest: str


def announce(folder: Path, launch: Launch) -> None:
    """Let the launcher start the engine."""
    _write(folder / LAUNCH_FILE, launch)


def withdraw(folder: Path) -> None:
    """Take that back: an engine that starts from now on waits."""
    (folder / LAUNCH_FILE).unlink(missing_ok=True)


def read_launch(folder: Path) -> Launch | None:
    """Return what an engine may start on, None while there is nothing.

    Raises:
        UntrustedError: the file is not the sidecar's.
    """
    return _read(folder / LAUNCH_FILE, Launch)


def report(folder: Path, boot: Boot) -> None:
    """Tell the sidecar of a start."""
    _write(folder / ENGINE_FILE, boot)


def retract(folder: Path) -> None:
    """Tell the sidecar that the engine has ended."""
    (folder / ENGINE_FILE).unlink(missing_ok=True)


def read_boot(folder: Path) -> Boot | None:
    """Return the engine's latest start, None while none runs.

    Raises:
        UntrustedError: the file is not the launcher's.
    """
    return _read(folder / ENGINE_FILE, Boot)


def _write(path: Path, message: Launch | Boot) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(asdict(message), stream)
        Path(draft).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(draft).unlink()
        raise


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UntrustedError(f"{path}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as stream:
        _check_owner(path, os.fstat(descriptor))
        data = stream.read(_MAX_BYTES)
    return _parse(path, data, kind)


def _check_owner(path: Path, status: os.stat_result) -> None:
    mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not mine:
        raise UntrustedError(
            f"{path}: owner {status.st_uid}, mode {stat.filemode(status.st_mode)}; it must be a file of user "
            f"{os.geteuid()} that nobody else can open: run both containers as one user"
        )


def _parse(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        found: Any = json.loads(data)
        # Fields that a newer side adds are ignored.
        message = kind(**{field.name: found[field.name] for field in fields(kind)})
    except (ValueError, TypeError, KeyError) as error:
        raise UntrustedError(f"{path}: not of the form that is expected: {error!r}") from None
    for field in fields(kind):
        if type(getattr(message, field.name)) is not field.type:
            raise UntrustedError(f"{path}: {field.name} is not of type {getattr(field.type, '__name__', field.type)}")
    return message
