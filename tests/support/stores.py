"""Content stores seen from outside: what is on its way in a folder, and a store in a process that can be killed."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from modelswap_engine.store.content import ContentStore


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def opened(folder: Path, *, limit: int = 0, shared: bool = False) -> ContentStore:
    store = ContentStore(folder, limit_bytes=limit, shared=shared)
    store.open()
    return store


def on_the_way(folder: Path) -> list[Path]:
    """Return the files of blobs that have no name yet, of all processes."""
    return [file for file in (folder / "members").glob("*/*") if file.name.isdigit()]


class Neighbour:
    """A store over a shared folder in a process of its own, which does one call after the other until it is killed."""

    def __init__(self, folder: Path, *, limit: int = 0) -> None:
        """Start it."""
        command = [sys.executable, "-m", "tests.support.stores", str(folder), str(limit)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.answer() == "open"

    def call(self, *call: Any) -> Any:
        """Call a method and return what it returned."""
        self.begin(*call)
        return self.answer()

    def begin(self, *call: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Return what the call returned, None once the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate()


def _serve(folder: Path, limit: int) -> None:
    store = opened(folder, limit=limit, shared=True)
    print(json.dumps("open"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(_called(store, name, arguments)), flush=True)


def _called(store: ContentStore, name: str, arguments: Sequence[Any]) -> Any:
    if name == "put":
        data = bytes.fromhex(arguments[0])
        return store.put(sha256(data), data)
    if name == "begin":
        (incoming,) = store.expect([("", arguments[0])])
        return incoming.write(0, bytes(arguments[1]))
    found = getattr(store, name)(*arguments)
    return sorted(found) if isinstance(found, set) else found


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
