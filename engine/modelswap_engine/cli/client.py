"""Speaking to a control port from the command line.

Uses the standard library only, so that the base installation can drive a remote engine. Every call is bounded in
time; a server's typed error is raised again as the type it was.
"""

import http.client
import json
import os
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from modelswap_engine.protocol.codec import decode, decode_error, encode
from modelswap_engine.protocol.errors import BadRequest, ModelswapError, Unavailable
from modelswap_engine.protocol.messages import SwapStatus
from modelswap_engine.protocol.version import CONTROL_PREFIX

T = TypeVar("T")

CALL_SECONDS = 3600.0
"""``plan`` and ``check`` may hash a whole checkpoint."""

CA_VARIABLE, NAME_VARIABLE = "MODELSWAP_CA_FILE", "MODELSWAP_SERVER_NAME"

EVENT_SECONDS = 60.0
"""Without an event or a heartbeat for so long a stream counts as lost."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Whose certificate is believed at an https:// address.

    Attributes:
        ca_file: the authorities; None means the system's.
        server_name: the name that the certificate must carry; "" means the host of the address.
        checked: False where something else proves who answers.
    """

    ca_file: Path | None = None
    server_name: str = ""
    checked: bool = True

    def context(self) -> ssl.SSLContext:
        """Return what a connection is opened with.

        Raises:
            BadRequest: the authorities cannot be read.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise BadRequest(
                f"authorities {self.ca_file}: {error.strerror or error}", advice=f"{CA_VARIABLE} names a PEM file"
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an intermediate authority may stand for itself
        if not self.checked:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def trust_of(environment: Mapping[str, str]) -> Trust:
    """Return what the variables of the environment say."""
    file = environment.get(CA_VARIABLE, "")
    return Trust(ca_file=Path(file) if file else None, server_name=environment.get(NAME_VARIABLE, ""))


class _NamedConnection(http.client.HTTPSConnection):
    """Connects to one address and has another name proved: pods are reached by address or through a port-forward."""

    def __init__(self, host: str, port: int, *, name: str, timeout: float, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._name, self._trusted = name, context

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._trusted.wrap_socket(self.sock, server_hostname=self._name)


class ControlClient:
    """One control port."""

    def __init__(self, url: str, *, token: str | None, trust: Trust | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"--url {url!r} is not an http(s) address", advice="use e.g. http://127.0.0.1:8001")
        self._url = url
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._secure else 8001)
        self._base = parts.path.rstrip("/") + CONTROL_PREFIX
        self._token = token
        trust = trust or Trust()
        self._name = trust.server_name or self._host
        self._context = trust.context() if self._secure else None

    def get(self, path: str, kind: type[T]) -> T:
        """Read a message."""
        return decode(self._call("GET", path, None, {}), kind)

    def post(self, path: str, message: object, kind: type[T], *, if_match: str | None = None) -> T:
        """Send a message and read the answer."""
        headers = {} if if_match is None else {"If-Match": if_match}
        return decode(self._call("POST", path, encode(message), headers), kind)

    def delete(self, path: str, message: object, kind: type[T], *, if_match: str | None = None) -> T:
        """Send a message that removes something and read the answer."""
        headers = {} if if_match is None else {"If-Match": if_match}
        return decode(self._call("DELETE", path, encode(message), headers), kind)

    def events(self, operation_id: str, *, after: int) -> Iterator[SwapStatus]:
        """Yield the states of an operation until it ends or the connection is lost."""
        path = f"/swaps/{quoted(operation_id)}/events"
        connection = self._connect(EVENT_SECONDS)
        try:
            connection.request("GET", self._base + path, headers=self._headers({"Last-Event-ID": str(max(after, 0))}))
            response = connection.getresponse()
            if response.status != 200:
                raise _error(response.status, response.read())
            for line in response:
                if line.startswith(b"data: "):
                    yield decode(line[6:].strip(), SwapStatus)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def _call(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        connection = self._connect(CALL_SECONDS)
        try:
            connection.request(method, self._base + path, body=body, headers=self._headers(headers))
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()
        if response.status >= 300:
            raise _error(response.status, data)
        return data

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        if self._context is not None:
            return _NamedConnection(self._host, self._port, name=self._name, timeout=seconds, context=self._context)
        return http.client.HTTPConnection(self._host, self._port, timeout=seconds)

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        headers = {"Content-Type": "application/json", **more}
        return headers if self._token is None else {**headers, "Authorization": f"Bearer {self._token}"}

    def _unreachable(self, error: Exception) -> Unavailable:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        advice = "is `modelswap serve` running, and is this its --control-port?"
        if isinstance(error, ssl.SSLError):
            advice = f"{CA_VARIABLE} and {NAME_VARIABLE} say whom to believe; does the port speak TLS?"
        return Unavailable(f"no answer from {self._url}: {reason}", advice=advice)


def _error(status: int, data: bytes) -> ModelswapError:
    try:
        return decode_error(data)
    except BadRequest:
        text = data[:200].decode("utf-8", "replace").strip()
        return Unavailable(f"unexpected answer {status}: {text}", advice="is this really a modelswap control port?")


def quoted(identity: str) -> str:
    """Return an operation id as one path segment."""
    return urllib.parse.quote(identity, safe="")


def connect(url: str, token_file: Path | None) -> ControlClient:
    """Return the control port that a command's options and the environment name.

    Raises:
        BadRequest: they cannot be used.
    """
    return ControlClient(url, token=read_token(token_file), trust=trust_of(os.environ))


def read_token(path: Path | None) -> str | None:
    """Return the first token of a token file.

    Raises:
        BadRequest: the file cannot be read or holds none.
    """
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadRequest(f"token file {path}: {reason}", advice="pass the file that `modelswap serve` uses") from None
    tokens = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not tokens or not all(" " < character <= "~" for character in tokens[0]):
        raise BadRequest(f"token file {path}: no usable token in it", advice="write one token a line")
    return tokens[0]


def pretty(message: object) -> str:
    """Return a message as indented JSON."""
    return json.dumps(json.loads(encode(message)), indent=2, ensure_ascii=False)
