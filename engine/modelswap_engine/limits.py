"""How much memory the processes of this container may still use.

The container's limit (cgroup v2, then v1, the tightest on the way up) and the machine's free memory, whichever is less.
Page cache that the kernel would drop is not counted as used; what lies in a memory volume is. The standard library
alone: it runs in a sidecar, in our own workers and inside foreign engines.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes; -1 means that nothing bounds it."""

    limit: int = -1
    available: int = -1


def machine_memory(file: Path = Path("/proc/meminfo")) -> Memory:
    """Return the memory of the whole machine; unbounded where the kernel does not tell."""
    sizes = dict(_sizes(_text(file)))
    if "MemTotal" not in sizes or "MemAvailable" not in sizes:
        return Memory()
    return Memory(limit=sizes["MemTotal"], available=sizes["MemAvailable"])


class MemoryProbe:
    """Reads the limits.

    Args:
        cgroups: where cgroup file systems are mounted.
        membership: the file that tells this process's cgroups.
        machine: what bounds the machine as a whole.
    """

    def __init__(
        self,
        *,
        cgroups: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
        machine: Callable[[], Memory] = machine_memory,
    ) -> None:
        self._cgroups = cgroups
        self._membership = membership
        self._machine = machine

    def read(self) -> Memory:
        """Return the tightest bound."""
        bounds = [bound for bound in (self._machine(), *self._bounds()) if bound.limit >= 0]
        if not bounds:
            return Memory()
        return Memory(limit=min(b.limit for b in bounds), available=max(0, min(b.available for b in bounds)))

    def _bounds(self) -> Iterator[Memory]:
        for line in _text(self._membership).splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                yield from self._walk(self._cgroups, path, v2)
            elif "memory" in controllers.split(","):
                yield from self._walk(self._cgroups / "memory", path, v1)

    @staticmethod
    def _walk(root: Path, path: str, read: Callable[[Path], Memory | None]) -> Iterator[Memory]:
        """Yield the bound of the cgroup and of each one above it; in a container the path may not be visible."""
        folder = root / path.lstrip("/")
        for place in dict.fromkeys([folder, *folder.parents, root]):
            if place == root or root in place.parents:
                bound = read(place)
                if bound is not None:
                    yield bound


def v2(folder: Path) -> Memory | None:
    """Return the bound that a cgroup v2 folder sets, if it sets one."""
    return _bound(folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file")


def v1(folder: Path) -> Memory | None:
    """Return the bound that a cgroup v1 memory folder sets, if it sets one."""
    return _bound(
        folder / "memory.limit_in_bytes",
        folder / "memory.usage_in_bytes",
        folder / "memory.stat",
        "total_inactive_file",
    )


def _bound(limit_file: Path, usage_file: Path, stat_file: Path, cache_key: str) -> Memory | None:
    limit, usage = _number(_text(limit_file)), _number(_text(usage_file))
    if limit is None or usage is None or limit >= 1 << 60:  # v1 says "unlimited" by a number near 2^63
        return None
    lines = (line.split() for line in _text(stat_file).splitlines())
    cache = next((int(words[1]) for words in lines if words[:1] == [cache_key] and len(words) == 2), 0)
    return Memory(limit=limit, available=limit - max(0, usage - cache))


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _sizes(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            yield name, int(words[0]) * 1024
