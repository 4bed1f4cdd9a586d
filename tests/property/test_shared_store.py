"""Two pods over one folder of blobs, in any order: held blobs stay, bytes are right, the limit is kept."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from modelswap_engine.protocol.errors import InsufficientDisk
from modelswap_engine.store.content import ContentStore
from tests.support.stores import on_the_way, opened, sha256

LIMIT = 40
BLOBS = [bytes([97 + number]) * (4 + 3 * number) for number in range(6)]
NAMES = {sha256(data): data for data in BLOBS}

pods = st.integers(0, 1)
blobs = st.sampled_from(BLOBS)


class TwoPods(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stores: list[ContentStore] = [self.start(), self.start()]
        self.kept: list[set[str]] = [set(), set()]

    def start(self) -> ContentStore:
        return opened(self.folder, limit=LIMIT, shared=True)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(pod=pods, data=blobs)
    def bring(self, pod: int, data: bytes) -> None:
        try:
            self.stores[pod].put(sha256(data), data)
        except InsufficientDisk:
            assert self.size() + len(data) > LIMIT

    @rule(pod=pods, kept=st.sets(blobs, max_size=3))
    def use(self, pod: int, kept: set[bytes]) -> None:
        """A pod says what it needs, and then looks whether it is there."""
        names = {sha256(data) for data in kept}
        store = self.stores[pod]
        store.hold("version", names)
        store.look({name: len(NAMES[name]) for name in names})
        self.kept[pod] = names - store.missing(names)

    @rule(pod=pods)
    def look(self, pod: int) -> None:
        self.stores[pod].look({name: len(data) for name, data in NAMES.items()})

    @rule(pod=pods)
    def crash(self, pod: int) -> None:
        del self.stores[pod]
        self.stores.insert(pod, self.start())
        self.kept[pod] = set()
        assert not on_the_way(self.folder)

    @rule(data=blobs, wrong=st.binary(min_size=1, max_size=30))
    def tamper(self, data: bytes, wrong: bytes) -> None:
        """Other bytes, no more than there were."""
        path = self.stores[0].path(sha256(data))
        if path.exists():
            path.chmod(0o600)
            path.write_bytes(wrong[: len(data)])
            for kept in self.kept:
                kept.discard(sha256(data))

    @invariant()
    def what_is_held_is_there(self) -> None:
        for store, kept in zip(self.stores, self.kept, strict=True):
            assert all(store.path(sha256).is_file() for sha256 in kept)

    @invariant()
    def the_limit_is_kept(self) -> None:
        assert self.size() <= LIMIT

    @invariant()
    def what_is_read_is_right(self) -> None:
        for store in self.stores:
            for name, data in NAMES.items():
                stream = store.open_blob(name)
                if stream is not None:
                    with stream:
                        assert stream.read() == data

    def size(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "blobs").glob("*/*"))


TestTwoPods = TwoPods.TestCase
TestTwoPods.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
