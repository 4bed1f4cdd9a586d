"""What the operator's process has done so far, by its own metrics and the kernel's."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_REQUESTS: Final = re.compile(
    r'^modelswap_rest_client_requests_total\{code="(\w+)",method="(\w+)"\} (\S+)$', re.MULTILINE
)
_WRITES: Final = re.compile(r'^modelswap_status_writes_total\{kind="\w+"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Counts since the process began; ``cpu`` in seconds of processor time, ``rss`` in bytes."""

    requests: int
    writes: int
    status_writes: int
    cpu: float
    rss: int

    def since(self, before: Seen) -> Seen:
        """Return what came after another look; memory is that of now."""
        return Seen(
            requests=self.requests - before.requests,
            writes=self.writes - before.writes,
            status_writes=self.status_writes - before.status_writes,
            cpu=self.cpu - before.cpu,
            rss=self.rss,
        )


def look(page: str, pid: int) -> Seen:
    """Read a page of metrics and the process."""
    counts = [(method, int(float(value))) for _, method, value in _REQUESTS.findall(page)]
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Seen(
        requests=sum(count for _, count in counts),
        writes=sum(count for method, count in counts if method in ("POST", "PUT", "PATCH", "DELETE")),
        status_writes=sum(int(float(value)) for value in _WRITES.findall(page)),
        cpu=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
        rss=1024 * int(resident.split()[1]),
    )
