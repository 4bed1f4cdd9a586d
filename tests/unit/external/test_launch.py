"""The launcher with real processes: it waits, tells, starts, and leaves nothing behind.

A small script is in the engine's place (``tests.support.launcher``): nothing here says how an engine behaves.
"""

import json
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelswap_engine.backends.external import handshake
from modelswap_engine.backends.external.command import BadCommandError, compose, environment
from modelswap_engine.backends.external.handshake import Boot, Launch, UntrustedError
from modelswap_engine.backends.launch import ENGINES
from tests.support.launcher import Launcher, alive

BOOT = Boot(boot_id="b" * 32, admin_key="k" * 43, engine="vllm", port=8100, digest="sha256:abc")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.clear()


def test_engine_starts_when_the_sidecar_has_written_its_checkpoint(launcher: Launcher) -> None:
    launcher.start("exit", options=["--port", "8123"])
    launcher.announce("sha256:one")
    told = launcher.told()
    assert launcher.ended() == 7
    assert told["arguments"][:5] == [str(launcher.model), "--host", "127.0.0.1", "--port", "8123"]
    assert told["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    assert told["environment"]["MODELSWAP_RUNTIME_DIR"] == str(launcher.runtime)
    assert len(told["environment"]["MODELSWAP_BOOT_ID"]) == 32
    assert "sha256:one" in launcher.log
    assert handshake.read_boot(launcher.runtime) is None  # nobody must think that it still runs


def test_each_start_has_an_id_and_a_key_of_its_own(launcher: Launcher) -> None:
    launcher.announce("sha256:one")
    boots = []
    for _ in range(2):
        launcher.start()
        boots.append(launcher.boot())
        launcher.signal()
        launcher.ended()
    assert len({boot.boot_id for boot in boots}) == len({boot.admin_key for boot in boots}) == 2
    assert {(boot.engine, boot.port, boot.digest) for boot in boots} == {("vllm", 8100, "sha256:one")}
    assert all(boot.admin_key not in launcher.log for boot in boots)


def test_only_the_same_user_can_read_the_key(launcher: Launcher) -> None:
    launcher.announce()
    launcher.start()
    launcher.boot()
    assert stat.S_IMODE((launcher.runtime / handshake.ENGINE_FILE).stat().st_mode) == 0o600


def test_sglang_is_told_its_key_and_its_version(launcher: Launcher) -> None:
    launcher.announce("sha256:one")
    launcher.start(engine="sglang")
    boot, told = launcher.boot(), launcher.told()
    # A key may begin with a dash.
    assert told["arguments"][-3:] == [f"--admin-api-key={boot.admin_key}", "--weight-version", "sha256:one"]
    assert "VLLM_SERVER_DEV_MODE" not in told["environment"]


def test_waiting_is_bounded_and_says_what_it_waited_for(launcher: Launcher) -> None:
    launcher.start(options=["--wait-seconds", "0.3"])
    assert launcher.ended() == 1
    assert "no checkpoint within 0.3 s" in launcher.log
    assert "launch.json" in launcher.log


def test_told_to_end_while_it_waits(launcher: Launcher) -> None:
    launcher.start()
    launcher.wait_until_it_waits()
    launcher.signal()
    assert launcher.ended() == 143
    assert "before the engine was started" in launcher.log


@pytest.mark.parametrize(("then", "code"), [("exit", 7), ("killed", 128 + signal.SIGKILL)])
@pytest.mark.parametrize("left", ["child", "stray", "child+stray"])
def test_what_an_engine_leaves_behind_ends_with_it(launcher: Launcher, then: str, code: int, left: str) -> None:
    launcher.announce()
    launcher.start(f"{then}+{left}")
    told = launcher.told()
    assert launcher.ended() == code
    assert told["children"]
    assert not any(alive(pid) for pid in [told["pid"], *told["children"]])


def test_a_stop_is_passed_on_and_the_engine_ends_in_its_own_way(launcher: Launcher) -> None:
    launcher.announce()
    launcher.start("clean+child")
    told = launcher.told()
    launcher.signal()
    assert launcher.ended() == 0
    assert not any(alive(pid) for pid in told["children"])


@pytest.mark.parametrize("twice", [False, True])
def test_an_engine_that_does_not_end_is_killed(launcher: Launcher, twice: bool) -> None:
    launcher.announce()
    launcher.start("ignore+child+stray", options=["--stop-seconds", "3600" if twice else "0.2"])
    told = launcher.told()
    launcher.signal()
    if twice:
        launcher.wait_until_it_took_the_signal()
        launcher.signal()
    assert launcher.ended() == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in [told["pid"], *told["children"]])


def test_a_program_that_is_not_there(launcher: Launcher) -> None:
    launcher.announce()
    launcher.start_with(["no-such-engine", "{model}"])
    assert launcher.ended() == 127
    assert "no-such-engine" in launcher.log
    assert handshake.read_boot(launcher.runtime) is None


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_the_word_of_somebody_else_is_not_believed(launcher: Launcher, mode: int) -> None:
    launcher.announce()
    (launcher.runtime / handshake.LAUNCH_FILE).chmod(mode)
    launcher.start()
    assert launcher.ended() == 1
    assert "run both containers as one user" in launcher.log


# Pure


@pytest.mark.parametrize(
    ("engine", "given", "word"),
    [
        ("vllm", [], "no command"),
        ("vllm", ["vllm", "serve", "/models/mine"], "names no {model}"),
        ("vllm", ["{model}"], "names no {model}"),
        (
            "vllm",
            ["vllm", "serve", "{model}", "--host", "0.0.0.0"],
            "relies on it; leave it out",
        ),
        ("vllm", ["vllm", "serve", "{model}", "--port=8000"], "--port=8000: the launcher sets it"),
        ("vllm", ["vllm", "serve", "{model}", "--uds", "/tmp/s"], "--uds: the launcher sets it"),
        ("vllm", ["vllm", "serve", "{model}", "--worker-extension-cls=a.B"], "the variable MODELSWAP_VLLM_EXTENSION"),
        ("sglang", ["sglang", "{model}", "--admin-api-key", "mine"], "--admin-api-key: the launcher sets it"),
        ("sglang", ["sglang", "{model}", "--weight-version=1"], "--weight-version=1: the launcher sets it"),
    ],
)
def test_commands_that_cannot_be_run_behind_a_sidecar(engine: str, given: list[str], word: str) -> None:
    with pytest.raises(BadCommandError) as caught:
        compose(given, ENGINES[engine], model="/m", boot=BOOT)
    assert word in str(caught.value)


def test_a_users_own_variable_wins_but_never_over_the_boot_id() -> None:
    base = {"VLLM_SERVER_DEV_MODE": "0", "MODELSWAP_BOOT_ID": "stale"}
    made = environment(base, ENGINES["vllm"], runtime_dir="/run/modelswap", boot=BOOT)
    assert made["VLLM_SERVER_DEV_MODE"] == "0"
    assert made["MODELSWAP_BOOT_ID"] == BOOT.boot_id


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"model": 1, "digest": "d"}', b"\xff", b'{"model": "m"}'])
def test_files_of_another_form_are_not_believed(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / handshake.LAUNCH_FILE
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(UntrustedError, match=handshake.LAUNCH_FILE):
        handshake.read_launch(tmp_path)


def test_links_are_not_believed(tmp_path: Path) -> None:
    handshake.announce(tmp_path, Launch(model="/m", digest="d"))
    (tmp_path / handshake.LAUNCH_FILE).rename(tmp_path / "elsewhere")
    (tmp_path / handshake.LAUNCH_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedError):
        handshake.read_launch(tmp_path)


def test_fields_of_a_newer_release_are_ignored_and_a_withdrawn_word_is_gone(tmp_path: Path) -> None:
    file = tmp_path / handshake.LAUNCH_FILE
    file.write_text(json.dumps({"model": "/m", "digest": "d", "later": 1}))
    file.chmod(0o600)
    assert handshake.read_launch(tmp_path) == Launch(model="/m", digest="d")
    handshake.withdraw(tmp_path)
    assert handshake.read_launch(tmp_path) is None
    handshake.withdraw(tmp_path)
