"""What `modelswap serve` does before it serves."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modelswap_engine.cli.main import app
from modelswap_engine.protocol.errors import SourceUnreadable


def test_a_start_does_not_wait_for_a_folder_whose_server_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **keywords: Any) -> Any:
            looked.append(str(path))
            return real(path, *arguments, **keywords)

        return call

    for name in ("stat", "lstat", "readlink"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    gone, model, token, no_folder = (tmp_path / name for name in ("gone", "model", "token", "file"))
    model.mkdir()
    token.write_text("secret")
    token.chmod(0o600)
    no_folder.touch()
    options = [f"--model={model}", f"--token-file={token}", f"--allow-root={gone}", f"--state-dir={tmp_path}/state"]
    error = CliRunner().invoke(app, ["serve", *options, f"--store-dir={no_folder}"]).exception
    assert isinstance(error, SourceUnreadable), error  # it came past the roots
    assert str(model) in looked
    assert str(gone) not in looked
