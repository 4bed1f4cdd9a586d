"""The journal: what this pod was told and what it did, in a file that survives the process.

One JSON object per line with a checksum. A last line that was torn by a crash is cut off, a damaged one elsewhere is
skipped (every other line stands for itself). It grows by appending and is rewritten when it is long. Calls block on the
disk: callers on an event loop make them in a thread.
"""

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from modelswap_engine.protocol.errors import Unavailable
from modelswap_engine.swap.records import JournalState, Record, fold

MAX_LINES: Final = 1024
_encoder = msgspec.json.Encoder()


class _Line(msgspec.Struct, frozen=True):
    sum: str
    record: msgspec.Raw


class Journal:
    """An open journal; use :meth:`open`.

    Attributes:
        state: what all records so far say.
        damaged: how many lines were unreadable when it was opened.
    """

    def __init__(self, path: Path, *, sync: Callable[[int], None]) -> None:
        self._path = path
        self._sync = sync
        self._guard = threading.Lock()
        self.state = JournalState()
        self.damaged = 0
        self._lines = 0
        self._moved = False
        self._recover()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._compact()

    @classmethod
    def open(cls, path: Path, *, sync: Callable[[int], None] = os.fsync) -> "Journal":
        """Open or create the journal at ``path`` and read it.

        Raises:
            Unavailable: the file cannot be read or written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, sync=sync)
        except OSError as error:
            raise _failed(path, error) from error

    def append(self, *records: Record) -> None:
        """Write records and return once they are on the disk.

        Raises:
            Unavailable: writing failed; nothing of it is remembered.
        """
        with self._guard:
            try:
                self._sync_folder()
                self._write(self._file, records)
            except OSError as error:
                raise _failed(self._path, error) from error
            for record in records:
                self.state = fold(self.state, record)
            self._lines += len(records)
            if self._lines > MAX_LINES:
                self._compact()

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        with self._guard:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _write(self, file: int, records: tuple[Record, ...]) -> None:
        data = b"".join(_line(record) for record in records)
        start = os.lseek(file, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(file, data) :]
            self._sync(file)
        except OSError:
            os.ftruncate(file, start)  # half a line would swallow the next one
            raise

    def _recover(self) -> None:
        content = self._path.read_bytes() if self._path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        for line in whole.split(b"\n")[:-1]:
            record = _read(line)
            if record is None:
                self.damaged += 1
            else:
                self.state = fold(self.state, record)
            self._lines += 1

    def _compact(self) -> None:
        """Replace the file by the shortest one with the same meaning; on failure the long one goes on."""
        records = self.state.records()
        if self._lines <= MAX_LINES and not self.damaged:
            return
        draft = self._path.with_suffix(".new")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_TRUNC | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                self._write(file, records)
                os.replace(draft, self._path)
            except OSError:
                os.close(file)
                raise
        except OSError:
            return
        # From here on this is the file that a restart reads, whatever else fails.
        old, self._file, self._lines = self._file, file, len(records)
        self._moved = True
        with suppress(OSError):
            os.close(old)
        with suppress(OSError):
            self._sync_folder()

    def _sync_folder(self) -> None:
        """Make the new file the one that a power failure leaves; it is tried again before the next record counts."""
        if not self._moved:
            return
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            self._sync(folder)
        finally:
            os.close(folder)
        self._moved = False


def _line(record: Record) -> bytes:
    raw = _encoder.encode(record)
    return _encoder.encode(_Line(sum=_sum(raw), record=msgspec.Raw(raw))) + b"\n"


def _sum(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _read(line: bytes) -> Record | None:
    try:
        parsed = msgspec.json.decode(line, type=_Line)
        raw = bytes(parsed.record)
        return msgspec.json.decode(raw, type=Record) if _sum(raw) == parsed.sum else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _failed(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"the journal {path.name} cannot be used: {error.strerror or error}",
        advice="give the state directory a writable volume with free space",
    )
