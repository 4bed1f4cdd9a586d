"""Remembered checksums: kept apart by all that they depend on, and none where the file is damaged."""

from pathlib import Path

import msgspec

from modelswap_engine.backends.external.plain.memory import SumMemory
from modelswap_engine.backends.sglang.answers import ServerInfo
from modelswap_engine.backends.sglang.support import layout_of

LAYOUT = layout_of(ServerInfo(version="0.5.23", device="cpu", dtype="auto"))
SUMS = {0: {"a": "1"}, 1: {"a": "2"}}


def test_what_was_remembered_is_recalled(tmp_path: Path) -> None:
    SumMemory(tmp_path / "sums").remember("sha256:1", LAYOUT, SUMS)
    assert SumMemory(tmp_path / "sums").recall("sha256:1", LAYOUT) == SUMS


def test_another_version_or_layout_is_not_recalled(tmp_path: Path) -> None:
    memory = SumMemory(tmp_path)
    memory.remember("sha256:1", LAYOUT, SUMS)
    assert memory.recall("sha256:2", LAYOUT) == {}
    for change in ({"version": "0.5.24"}, {"device": "cuda"}, {"dtype": "float32"}, {"tp_size": 2}):
        assert memory.recall("sha256:1", msgspec.structs.replace(LAYOUT, **change)) == {}


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    memory = SumMemory(tmp_path)
    memory.remember("sha256:1", LAYOUT, SUMS)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"{")
    assert memory.recall("sha256:1", LAYOUT) == {}
