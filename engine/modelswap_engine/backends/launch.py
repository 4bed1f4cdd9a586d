"""The launcher: process 1 of the engine's container. It starts the engine on the version that the sidecar assigns.

    python3 -m modelswap_engine.backends.launch --engine vllm -- vllm serve {model} --max-model-len 8192

1. wait, within a time, until the sidecar has written the checkpoint that must be served (``launch.json``)
2. tell the sidecar of this start: a random boot id and a random admin key (``engine.json``)
3. run the engine, on the loopback interface, from that checkpoint; ``{model}`` stands for its path
4. when the engine ends, end all that it left behind, and end with its exit code

Only the standard library: it runs with the Python of the engine's image, in which nothing of ours is installed.
"""

import argparse
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external import children, handshake
from modelswap_engine.backends.external.command import BadCommandError, Rules, compose, environment
from modelswap_engine.backends.external.handshake import Boot, Launch, UntrustedError
from modelswap_engine.backends.sglang import launch as sglang
from modelswap_engine.backends.vllm import launch as vllm

ENGINES: Final[Mapping[str, Rules]] = {"vllm": vllm.RULES, "sglang": sglang.RULES}

RUNTIME_DIR: Final = Path("/run/modelswap")
ENGINE_PORT: Final = 8100
WAIT_SECONDS: Final = 1800.0
STOP_SECONDS: Final = 30.0
USAGE, FAILED, NOT_FOUND, STOPPED = 2, 1, 127, 143
_POLL_SECONDS: Final = 0.2
_LINE_SECONDS: Final = 10.0


class StoppedError(Exception):
    """This process was asked to end before there was an engine."""


class WaitedTooLongError(Exception):
    """The sidecar has written no checkpoint in time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the engine ends; returns the exit code."""
    options = parser().parse_args(arguments)
    given = options.command[1:] if options.command[:1] == ["--"] else options.command
    children.hold_signals()
    try:
        launch = wait_for_launch(options.runtime_dir, seconds=options.wait_seconds)
        return start(given, options, launch=launch, base=os.environ)
    except BadCommandError as error:
        return _fail(str(error), USAGE)
    except (UntrustedError, WaitedTooLongError, OSError) as error:
        return _fail(str(error), NOT_FOUND if isinstance(error, FileNotFoundError) else FAILED)
    except StoppedError:
        return _fail("told to end before the engine was started", STOPPED)


def wait_for_launch(folder: Path, *, seconds: float) -> Launch:
    """Wait until the sidecar says what to start on; says now and then that it waits.

    Raises:
        WaitedTooLongError: not in time.
        StoppedError: told to end.
        UntrustedError: the word is not the sidecar's.
    """
    began, said = time.monotonic(), float("-inf")
    while True:
        launch = handshake.read_launch(folder)
        if launch is not None:
            return launch
        now = time.monotonic()
        if now - began >= seconds:
            raise WaitedTooLongError(
                f"the sidecar has written no checkpoint within {seconds:g} s ({folder / handshake.LAUNCH_FILE}); "
                "its log and GET /modelswap/v1/state say why"
            )
        if now - said >= _LINE_SECONDS:
            said = now
            _say(f"waiting for the sidecar's checkpoint, {now - began:.0f} s of at most {seconds:g} s")
        if children.stop_asked(_POLL_SECONDS):
            raise StoppedError


def start(given: Sequence[str], options: argparse.Namespace, *, launch: Launch, base: Mapping[str, str]) -> int:
    """Start the engine and see it to its end; returns its exit code.

    Raises:
        BadCommandError: the command cannot be run behind a sidecar.
        OSError: it cannot be started.
    """
    boot = Boot(
        boot_id=secrets.token_hex(16),
        admin_key=secrets.token_urlsafe(32),
        engine=options.engine,
        port=options.port,
        digest=launch.digest,
    )
    rules = ENGINES[boot.engine]
    command = compose(given, rules, model=launch.model, boot=boot)
    variables = environment(base, rules, runtime_dir=str(options.runtime_dir), boot=boot)
    _say(f"starting {command[0]} on {launch.model} ({launch.digest}), boot {boot.boot_id}")
    handshake.report(options.runtime_dir, boot)
    try:
        code = children.run(command, variables, stop_seconds=options.stop_seconds, clock=time.monotonic)
    finally:
        handshake.retract(options.runtime_dir)
    _say(f"{command[0]} ended with exit code {code}")
    return code


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(prog="modelswap launch", description=__doc__.partition("\n\n")[0])
    made.add_argument("--engine", required=True, choices=sorted(ENGINES), help="which engine the command starts")
    made.add_argument("--port", type=int, default=ENGINE_PORT, help="where it listens, on the loopback interface")
    made.add_argument("--runtime-dir", type=Path, default=RUNTIME_DIR, help="memory volume shared with the sidecar")
    made.add_argument("--wait-seconds", type=float, default=WAIT_SECONDS, help="wait so long for the sidecar")
    made.add_argument("--stop-seconds", type=float, default=STOP_SECONDS, help="SIGTERM: kill it after so long")
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the engine's command")
    return made


def _say(line: str) -> None:
    sys.stderr.write(f"modelswap launch: {line}\n")
    sys.stderr.flush()


def _fail(reason: str, code: int) -> int:
    _say(f"error: {reason}")
    return code


if __name__ == "__main__":
    sys.exit(main())
