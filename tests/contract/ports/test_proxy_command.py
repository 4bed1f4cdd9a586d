"""`modelswap proxy`: what it refuses before it starts anything."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from modelswap_engine.cli.main import app
from modelswap_engine.protocol.errors import BadRequest, ModelswapError


def run(model: Path, *options: str) -> ModelswapError:
    arguments = ["proxy", "--backend", "vllm", "--model", str(model), "--state-dir", str(model / "state"), "--insecure"]
    error = CliRunner().invoke(app, [*arguments, "--port", "0", "--control-port", "0", *options]).exception
    assert isinstance(error, ModelswapError), error
    return error


@pytest.mark.parametrize(
    "upstream",
    [
        "http://10.0.0.7:8000",
        "http://vllm.default.svc:8000",
        "https://127.0.0.1:8000",
        "http://127.0.0.1:8000/v1",
        "http://user@127.0.0.1:8000",
        "http://127.0.0.1@10.0.0.7:8000",
        "127.0.0.1:8000",
        "",
    ],
)
def test_the_engine_must_be_in_the_same_pod(tmp_path: Path, upstream: str) -> None:
    error = run(tmp_path, "--upstream", upstream)

    assert isinstance(error, BadRequest)
    assert "not an address of this pod" in error.message


@pytest.mark.parametrize("option", ["--checkpoint-dir", "--runtime-dir"])
def test_the_launchers_folders_belong_together(tmp_path: Path, option: str) -> None:
    error = run(tmp_path, "--upstream", "http://127.0.0.1:9", option, str(tmp_path))

    assert "belong together" in error.message


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no such folder" in run(tmp_path / "missing", "--upstream", "http://127.0.0.1:9").message
