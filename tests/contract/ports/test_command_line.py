"""The command line against a real control port: what it prints, where, and with which exit code."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from modelswap_engine.cli import operations
from modelswap_engine.cli.client import ControlClient, read_token
from modelswap_engine.cli.follow import follow
from modelswap_engine.cli.main import app
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import BadRequest, ModelswapError, StateMoved, Unauthenticated, Unavailable
from modelswap_engine.protocol.messages import Fence, RollbackRequest, SwapStatus
from modelswap_engine.protocol.states import SwapState
from tests.support.ports import TOKEN, Ports, open_ports
from tests.support.serve import environment


async def run(ports: Ports, *arguments: str) -> Result:
    variables = {"MODELSWAP_URL": ports.control_url, "MODELSWAP_TOKEN_FILE": str(ports.tokens), "COLUMNS": "160"}
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=variables)


async def test_swap_follows_to_the_end(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    done = await run(ports, "swap", "--source", target.uri, "--version", "1.1")
    assert done.exit_code == 0, done.output
    assert "Serving" in done.stderr
    assert "commit window  5 µs" in done.stdout
    state = ports.coordinator.state()
    assert state.live == target
    assert (state.owner_uid, state.revision) == ("cli", 1)
    back = await run(ports, "rollback", "-o", "json")
    assert back.exit_code == 0
    assert json.loads(back.stdout)["target"]["version"] == "1.0"
    assert "1.1" in (await run(ports, "state")).stdout
    released = await run(ports, "release", "-o", "json")
    assert released.exit_code == 0
    assert json.loads(released.stdout)["previous"] is None


async def test_a_refused_swap_exits_with_one_and_says_why(ports: Ports) -> None:
    done = await run(ports, "swap", "--source", "file:///models/9")
    assert done.exit_code == 1
    assert "error: SourceNotFound: file:///models/9: nothing is there" in done.stdout
    assert ports.coordinator.ready()


async def test_plan_state_check_and_pause(ports: Ports) -> None:
    target = ports.publish("1.1", norm=b"N" * 2)
    assert "1 of 2 change" in (await run(ports, "plan", "--source", target.uri)).stdout
    shown = (await run(ports, "state")).stdout
    assert "open, 0 queued" in shown
    assert "0 inside" in shown
    assert (await run(ports, "check")).stdout.startswith("ok: 2 tensors")
    assert (await run(ports, "check", "none*")).exit_code in (0, 1)
    paused = await run(ports, "pause", "--seconds", "20", "-o", "json")
    assert json.loads(paused.stdout)["gate"]["leaseOwner"] == "cli"
    assert "open" in (await run(ports, "resume")).stdout


async def test_a_check_against_a_snapshot_names_what_changed(tmp_path: Path) -> None:
    async with open_ports(tmp_path, debug_checks=True) as ports:
        assert (await run(ports, "check", "--action", "Snapshot")).exit_code == 0
        ports.backend.live["norm"] = b"!!"
        changed = await run(ports, "check", "--action", "Compare")
        assert changed.exit_code == 1
        assert "norm (checkpoint coordinates): expected" in changed.stdout
        ports.backend.live["norm"] = b"nn"
        assert (await run(ports, "check", "--action", "Compare")).exit_code == 0


async def test_cancel_without_an_operation(ports: Ports) -> None:
    done = await run(ports, "cancel")
    assert isinstance(done.exception, ModelswapError)
    assert "no operation is running" in done.exception.message


async def test_a_wrong_token_is_an_error_of_its_type(ports: Ports, tmp_path: Path) -> None:
    def ask() -> EngineState:
        return ControlClient(ports.control_url, token="wrong").get("/state", EngineState)

    with pytest.raises(Unauthenticated):
        await asyncio.to_thread(ask)


def test_the_state_moving_once_is_decided_again() -> None:
    class Moving:
        posted = 0

        def get(self, path: str, kind: type[EngineState]) -> EngineState:
            return EngineState(boot_id="b", seq=self.posted, revision=self.posted)

        def post(self, path: str, message: RollbackRequest, kind: type[SwapStatus], *, if_match: str) -> SwapStatus:
            self.posted += 1
            if if_match != '"b.2"':
                raise StateMoved("moved")
            return SwapStatus(operation_id=message.operation_id, revision=message.fence.revision)

    client = Moving()

    def decide(fence: Fence) -> RollbackRequest:
        return RollbackRequest(operation_id="op", fence=fence)

    status = operations._accepted(client, "/rollback", decide)  # type: ignore[arg-type]
    assert (client.posted, status.revision) == (3, 3)


def test_a_broken_stream_of_events_is_taken_up_again() -> None:
    def at(state: SwapState, seq: int) -> SwapStatus:
        return SwapStatus(operation_id="op", seq=seq, state=state)

    class Breaking:
        streams = 0

        def events(self, operation_id: str, *, after: int) -> Iterator[SwapStatus]:
            self.streams += 1
            if self.streams == 1:
                yield at(SwapState.FETCHING, 2)
                raise Unavailable("connection reset")
            if self.streams == 2:
                raise Unavailable("connection refused")
            assert after == 2
            yield at(SwapState.SERVING, 9)

        def get(self, path: str, kind: type[SwapStatus]) -> SwapStatus:
            raise AssertionError("the stream told the end")

    last = follow(Breaking(), at(SwapState.PLANNED, 1), quiet=True)  # type: ignore[arg-type]
    assert last.state is SwapState.SERVING


def module(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command where neither torch nor an HTTP library can be imported."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'aiohttp', 'transformers', 'structlog')));"
    code = f"{blocked} sys.argv[0] = 'modelswap'; from modelswap_engine.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(), capture_output=True, text=True, timeout=60
    )


def test_help_and_version_need_no_heavy_library() -> None:
    shown = module("--help")
    assert shown.returncode == 0, shown.stderr
    for command in ("serve", "swap", "rollback", "state", "manifest", "diff"):
        assert command in shown.stdout
    assert module("--version").stdout.startswith("modelswap ")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("state", "--url", "http://127.0.0.1:1"), 1, "no answer from http://127.0.0.1:1"),
        (("state", "--url", "ftp://x"), 1, "not an http"),
        (("state", "--token-file", "/nonexistent"), 1, "token file /nonexistent"),
        (("serve", "--model", "/tmp"), 1, "no way to authenticate"),
        (("serve", "--model", "/tmp", "--insecure", "--token-file", "x"), 1, "exclude each other"),
        (("serve", "--model", "/tmp", "--auth", "kubernetes"), 1, "--allowed-subject"),
        (("serve", "--model", "/tmp", "--insecure"), 1, "needs the package"),
        (("serve",), 2, "--model"),
        (("swap", "--mode", "Sometimes"), 2, "Sometimes"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_errors_are_two_lines_for_a_person(arguments: tuple[str, ...], code: int, text: str) -> None:
    done = module(*arguments)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert done.stderr.startswith("error: ")
        assert "\nnext: " in done.stderr


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"\xff", "schlüssel".encode()])
def test_token_files_of_clients(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match="token file"):
        read_token(path)
    path.write_text(f"# first\n{TOKEN}\nother\n")
    assert read_token(path) == TOKEN
    assert read_token(None) is None
