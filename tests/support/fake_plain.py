"""An engine that loads folders by itself, in memory: its parameters are the tensors of checkpoints, by their names.

It stands in for a real engine in unit tests of what all plain routes have in common, and nowhere else.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from modelswap_engine.backends.external.control import EngineFacts
from modelswap_engine.backends.external.plain.adopt import Sight, look
from modelswap_engine.backends.external.plain.engine import Taken, Watching
from modelswap_engine.backends.external.plain.live import Held, Staged
from modelswap_engine.backends.external.plain.memory import Layout
from modelswap_engine.backends.external.plain.sums import Sums
from modelswap_engine.backends.external.watch import Watch
from modelswap_engine.backends.port import Load, RequestPolicy
from modelswap_engine.protocol.errors import Busy, DigestMismatch, WorkerLost
from tests.support.fake_control import FakeControl
from tests.support.fake_source import sha256
from tests.support.orders import ranges

LAYOUT = Layout(version="1.0", device="cpu", dtype="bfloat16", quantization="", tp_size=1, pp_size=1, dp_size=1)


class FakePlain:
    """See the module, and :class:`~modelswap_engine.backends.external.plain.engine.PlainEngine`.

    Attributes:
        live: the bytes of its parameters.
        calls: what it was asked, in order.
        on_load: called just before it loads a folder.
        well: what it says of its loads.
        keeps: bytes that it holds on to, whatever it is told to load.
        on_wrong: called when it was found to hold something else than it must.
        drains: it can be emptied of requests.
    """

    name = "fake"

    def __init__(self, folder: Path, *, undoes: bool = True) -> None:
        self.control = FakeControl()
        self.undoes = undoes
        self.live = read(folder)
        self.calls: list[str] = []
        self.on_load: Callable[[Path], None] = lambda folder: None
        self.on_wrong: Callable[[], None] = lambda: None
        self.well = True
        self.keeps: dict[str, bytes] = {}
        self.drains = True

    def restart(self, folder: Path) -> None:
        """Another start, on this version."""
        self.control.restart()
        self.live = read(folder)

    def in_use(self) -> Path | None:
        return None

    def watch(self, *, busy: Callable[[], bool], lost: Callable[[], None]) -> Watching:
        return Watch(self.control, seconds=0.01, answer_seconds=1.0, misses=2, lost=lost)

    async def take(self, order: Load, facts: EngineFacts, *, folder: Path | None) -> Taken:
        self.calls.append("take")
        live = self._sums()
        sight = Sight(exact=True, dtype="bfloat16", digits=64, loaded_from=None)
        found = await look(order, live, sight=sight, recalled={})
        if found.held.judge(live).wrong:
            self.on_wrong()
            raise WorkerLost("it holds other weights")
        return Taken(architecture="Fake", layout=LAYOUT, found=found, live=live)

    async def pause(self, policy: RequestPolicy, *, seconds: float) -> None:
        self.calls.append("pause")
        if not self.drains:
            raise Busy("requests are left")

    async def go_on(self) -> None:
        self.calls.append("go on")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def exchange(self, folder: Path, wanted: Held) -> bool:
        self.calls.append("exchange")
        self.on_load(folder)
        self.live |= {**read(folder), **self.keeps}
        return self.well

    async def undo(self, staged: Staged) -> None:
        self.calls.append("undo")
        self.live |= read(staged.back)

    async def sums(self) -> Mapping[int, Sums]:
        self.calls.append("hash")
        return self._sums()

    def _sums(self) -> dict[int, dict[str, str]]:
        return {0: {name: sha256(data) for name, data in self.live.items()}}

    async def prove(self, wanted: Held, *, loaded: Staged | None) -> Mapping[int, Sums]:
        if loaded is not None:
            return {}
        live = await self.sums()
        if wanted.judge(live).wrong:
            raise DigestMismatch("it holds something else")
        return live

    async def close(self) -> None:
        self.calls.append("close")


def read(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the tensors in a folder."""
    found = {}
    for item in ranges(folder):
        with Path(item.path).open("rb") as file:
            file.seek(item.offset)
            found[item.name] = file.read(item.nbytes)
    return found
