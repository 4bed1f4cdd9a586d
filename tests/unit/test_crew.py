"""Threads that go through bytes: what they hold does not grow with the machine."""

from pathlib import Path

import pytest

from modelswap_engine.checkpoint import crew, files
from modelswap_engine.checkpoint.crew import BUFFERS_BYTES, CHUNK_BYTES, Crew


@pytest.mark.parametrize("cores", [1, 2, 8, 64, 192])
def test_buffers_of_all_threads_together_are_bounded_whatever_the_node_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(crew, "cores", lambda: cores)
    content = bytes(range(256)) * (CHUNK_BYTES // 256) + b"end"
    (tmp_path / "file").write_bytes(content)
    read = bytearray()
    largest = 0

    def work(_: int) -> None:
        nonlocal largest
        with files.open_inside(tmp_path, "file", roots=[tmp_path.resolve()]) as source:
            for chunk in made.chunks(source, 0, len(content)):
                largest = max(largest, len(chunk))
                read.extend(chunk)

    made = Crew("reading", total=len(content))
    made.run(work, [0])
    assert read == content
    assert 0 < largest * cores <= BUFFERS_BYTES
    assert largest <= CHUNK_BYTES
