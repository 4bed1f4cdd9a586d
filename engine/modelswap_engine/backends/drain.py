"""The preStop hook of the engine's container: wait until the sidecar has no request left, so that the engine may end.

    python3 -m modelswap_engine.backends.drain --control-port 8001 --seconds 75

Only the standard library: it runs with the Python of the engine's image. The key that lets it in is in the memory
volume that launcher and sidecar share; nothing of it is in the pod's specification.
"""

import argparse
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from modelswap_engine.backends.external import handshake
from modelswap_engine.backends.external.command import LOOPBACK
from modelswap_engine.backends.external.handshake import UntrustedError
from modelswap_engine.backends.launch import RUNTIME_DIR

CONTROL_PORT: Final = 8001
SECONDS: Final = 75.0
_PATH: Final = "/engine-drain"


def main(arguments: Sequence[str] | None = None) -> int:
    """Drain; returns the exit code. A hook that fails does not keep the container from ending."""
    options = parser().parse_args(arguments)
    try:
        boot = handshake.read_boot(options.runtime_dir)
        if boot is None:
            return _done("no engine runs; nothing to drain", 0)
        return _done(_drain(options.control_port, tls=options.tls, key=boot.admin_key, seconds=options.seconds), 0)
    except (UntrustedError, OSError) as error:  # URLError and timeouts are OSErrors
        return _done(f"error: not drained: {error}", 1)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    made.add_argument("--control-port", type=int, default=CONTROL_PORT, help="control port of the sidecar")
    made.add_argument("--tls", action="store_true", help="the control port speaks TLS")
    made.add_argument("--seconds", type=float, default=SECONDS, help="wait at most so long")
    made.add_argument("--runtime-dir", type=Path, default=RUNTIME_DIR, help="memory volume shared with the sidecar")
    return made


def _drain(port: int, *, tls: bool, key: str, seconds: float) -> str:
    url = f"{'https' if tls else 'http'}://{LOOPBACK}:{port}{_PATH}"
    request = urllib.request.Request(url, method="POST", headers={"Authorization": f"Bearer {key}"})  # noqa: S310  # loopback
    # Never through a proxy of the environment.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls:
        # This pod's own loopback interface needs no proof, and no authority is mounted in the engine's container.
        unproved = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unproved.check_hostname, unproved.verify_mode = False, ssl.CERT_NONE
        handlers.append(urllib.request.HTTPSHandler(context=unproved))
    with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as answer:
        text: str = answer.read(1024).decode(errors="replace").strip()
        return text


def _done(line: str, code: int) -> int:
    sys.stderr.write(f"modelswap drain: {line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
