"""The disk, for tests that write many small files and ask nothing about power cuts."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def unsynced() -> Iterator[None]:
    """Nobody waits until bytes are on the disk: a busy machine would make seconds into minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
