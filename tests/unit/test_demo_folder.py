"""Folders that are made once: complete or absent, made anew when what they come from changes, readable by all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from demo.folder import is_made, key_of, make


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir(mode=0o700)
        file = folder / "sub" / "file"
        file.write_text(text)
        file.chmod(0o600)

    return write


def test_what_is_made_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert make(folder, "key", writer("one"))
    assert not make(folder, "key", writer("two"))
    assert (folder / "sub" / "file").read_text() == "one"
    assert is_made(folder, "key")


def test_another_key_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make(folder, "key", writer("one"))
    assert make(folder, "other", writer("two"))
    assert (folder / "sub" / "file").read_text() == "two"


def test_a_failure_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make(folder, "key", writer("one"))

    def fail(unfinished: Path) -> None:
        (unfinished / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make(folder, "other", fail)
    assert is_made(folder, "key")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


def test_other_users_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make(folder, "key", writer("one"))
    assert folder.stat().st_mode & 0o055 == 0o055
    assert (folder / "sub").stat().st_mode & 0o055 == 0o055
    assert (folder / "sub" / "file").stat().st_mode & 0o044 == 0o044


def test_a_key_covers_contents_and_their_borders(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    first = key_of(file)
    file.write_text("b")
    assert key_of(file) != first
    assert key_of("ab", "c") != key_of("a", "bc")
