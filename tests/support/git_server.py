"""A git repository behind smart HTTP on loopback, as GitOps controllers read one.

git does the protocol (`git http-backend`); this only hands it requests. Refuses to know what is in the files.
"""

from __future__ import annotations

import http.server
import os
import subprocess
import threading
from pathlib import Path
from typing import Any


class GitServer:
    """One bare repository and its working copy below a folder, served until closed."""

    def __init__(self, folder: Path) -> None:
        """Make the repository, and start to serve it."""
        self._work = folder / "work"
        served = folder / "served"
        bare = served / "models.git"
        _git("init", "--quiet", "--bare", "--initial-branch=main", str(bare), at=folder)
        _git("clone", "--quiet", str(bare), str(self._work), at=folder)
        _git("checkout", "--quiet", "-B", "main", at=self._work)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(served))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/models.git"

    def push(self, message: str, **files: str) -> str:
        """Commit files (``name="content"``, a YAML file each) and push them; return the commit."""
        for name, content in files.items():
            path = self._work / "models" / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        _git("add", "--all", at=self._work)
        _git("commit", "--quiet", "--message", message, at=self._work)
        return self._publish()

    def revert(self) -> str:
        """Push the revert of the last commit; return the new one."""
        _git("revert", "--no-edit", "HEAD", at=self._work)
        return self._publish()

    def revert_to(self, commit: str) -> str:
        """Push the files of an earlier commit; return the new one."""
        _git("checkout", "--quiet", commit, "--", ".", at=self._work)
        _git("commit", "--quiet", "--message", f"as of {commit}", at=self._work)
        return self._publish()

    def head(self) -> str:
        """Return the commit that was pushed last."""
        return _git("rev-parse", "HEAD", at=self._work).strip()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _publish(self) -> str:
        _git("push", "--quiet", "origin", "main", at=self._work)
        return self.head()


_AUTHOR = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "somebody"), ("EMAIL", "somebody@localhost"))
}


def _git(*arguments: str, at: Path) -> str:
    environment = {**os.environ, **_AUTHOR, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(["git", *arguments], cwd=at, env=environment, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"git {' '.join(arguments)} ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _handler(served: Path) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._hand_on(b"")

        def do_POST(self) -> None:
            self._hand_on(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        def _hand_on(self, body: bytes) -> None:
            path, _, query = self.path.partition("?")
            request = {
                "GIT_PROJECT_ROOT": str(served),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "REMOTE_ADDR": "127.0.0.1",
                "CONTENT_LENGTH": str(len(body)),
                "CONTENT_TYPE": self.headers.get("Content-Type") or "",
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding") or "",
                "GIT_PROTOCOL": self.headers.get("Git-Protocol") or "",
            }
            environment = {**os.environ, **request}
            done = subprocess.run(
                ["git", "http-backend"], input=body, env=environment, capture_output=True, check=True, timeout=60
            )
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
            self.send_response(int(headers.pop("Status", "200").split()[0]))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
