"""The control port of one pod's sidecar.

Every call is bounded in time and in size and follows no redirect (a sidecar never redirects; whoever does is not one).
Whatever goes wrong is one of the protocol's typed errors, or an ``Engine…`` of this module or of ``trust``.
Nothing is said, and no token is asked for, before ``trust`` allows the way and, with TLS, the pod has proved its name.
"""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import aiohttp

from modelswap_engine.protocol import telemetry
from modelswap_engine.protocol.adapter_calls import AssignAdaptersRequest, ResolveAdaptersRequest, ResolvedAdapters
from modelswap_engine.protocol.adapters import AdapterRegistry
from modelswap_engine.protocol.codec import decode, decode_error, encode
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.errors import BadRequest, Unauthenticated, Unavailable, WrongPod
from modelswap_engine.protocol.looking import LookRequest, SourceLook
from modelswap_engine.protocol.messages import (
    CancelRequest,
    HoldRequest,
    Plan,
    PlanRequest,
    ProceedRequest,
    SwapRequest,
    SwapStatus,
)
from modelswap_engine.protocol.prefetch import PrefetchRequest, PrefetchState
from modelswap_engine.protocol.version import CONTROL_PREFIX, PROTOCOL_VERSION, supported
from modelswap_operator.effects.tokens import Tokens
from modelswap_operator.effects.trust import PLAIN_ONLY, Channel, EngineTlsRefused, Trust

T = TypeVar("T")
BODY_LIMIT = 8 * 1024 * 1024


class EngineUnreachable(Unavailable):
    """No connection to the control port."""

    code = "EngineUnreachable"


class EngineTimeout(Unavailable):
    """The control port did not answer in time."""

    code = "EngineTimeout"


class EngineProtocolUnsupported(Unavailable):
    """The sidecar speaks a protocol version that is too old."""

    code = "EngineProtocolUnsupported"


class EngineFailed(Unavailable):
    """The answer is not one of the protocol's."""

    code = "EngineFailed"


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds. A plan may read and hash a whole checkpoint, so it has its own bound; a look ends in 30 s by itself."""

    connect: float = 2.0
    call: float = 10.0
    plan: float = 600.0
    look: float = 45.0


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a pod's control port is, and which pod that must be."""

    pod: str
    uid: str
    ip: str
    port: int
    namespace: str = ""
    tls: bool = False

    @property
    def url(self) -> str:
        """Return the base URL of the control routes."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{CONTROL_PREFIX}"


class EngineClient:
    """Calls to sidecars; an async context manager that owns the connections."""

    def __init__(self, tokens: Tokens, *, trust: Trust = PLAIN_ONLY, timeouts: Timeouts | None = None) -> None:
        self._tokens = tokens
        self._trust = trust
        self._timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def state(self, pod: Address) -> EngineState:
        """Read the one view of everything."""
        state = await self._call("GET", pod, "/state", EngineState)
        if not supported(state.protocol_version):
            raise EngineProtocolUnsupported(
                f"the sidecar speaks protocol {state.protocol_version}, this operator {PROTOCOL_VERSION}",
                advice="upgrade the engine image",
            )
        if state.pod_uid not in ("", pod.uid):
            raise WrongPod(
                f"pod UID {state.pod_uid} answers at {pod.ip}, not {pod.uid}", advice="pod IPs are reused; asked again"
            )
        return state

    async def plan(self, pod: Address, request: PlanRequest) -> Plan:
        """Ask what a swap would do."""
        return await self._call("POST", pod, "/plan", Plan, body=request, seconds=self._timeouts.plan)

    async def swap(self, pod: Address, request: SwapRequest, *, if_match: str) -> SwapStatus:
        """Start a swap; the answer comes as soon as it is accepted."""
        headers, operation = {"If-Match": if_match}, request.operation_id
        return await self._call("POST", pod, "/swaps", SwapStatus, body=request, headers=headers, operation=operation)

    async def assign_adapters(self, pod: Address, request: AssignAdaptersRequest) -> AdapterRegistry:
        """Tell the pod which adapters are assigned; the answer comes as soon as it is remembered."""
        return await self._call("PUT", pod, "/adapters", AdapterRegistry, body=request)

    async def resolve_adapters(self, pod: Address, request: ResolveAdaptersRequest) -> ResolvedAdapters:
        """Ask what sources of adapters hold."""
        seconds = self._timeouts.plan
        return await self._call("POST", pod, "/adapters/resolve", ResolvedAdapters, body=request, seconds=seconds)

    async def cancel(self, pod: Address, operation_id: str, request: CancelRequest) -> SwapStatus:
        """Abort an operation that has not committed."""
        return await self._call(
            "POST", pod, f"/swaps/{operation_id}/cancel", SwapStatus, body=request, operation=operation_id
        )

    async def hold(self, pod: Address, operation_id: str, request: HoldRequest) -> SwapStatus:
        """Renew the lease of a swap that waits once it has staged."""
        return await self._call("POST", pod, f"/swaps/{operation_id}/hold", SwapStatus, body=request)

    async def look(self, pod: Address, request: LookRequest) -> SourceLook:
        """Ask whether the source still holds what the pod serves."""
        return await self._call("POST", pod, "/look", SourceLook, body=request, seconds=self._timeouts.look)

    async def look_at_adapter(self, pod: Address, request: LookRequest) -> SourceLook:
        """Ask whether the source of an adapter still holds it; all of it may be read for that."""
        return await self._call("POST", pod, "/adapters/look", SourceLook, body=request, seconds=self._timeouts.plan)

    async def prefetch(self, pod: Address, request: PrefetchRequest) -> list[PrefetchState]:
        """Have versions fetched ahead of their time."""
        return await self._call("POST", pod, "/prefetch", list[PrefetchState], body=request)

    async def proceed(self, pod: Address, operation_id: str, request: ProceedRequest) -> SwapStatus:
        """Let a swap that waits go on."""
        return await self._call("POST", pod, f"/swaps/{operation_id}/proceed", SwapStatus, body=request)

    async def _call(
        self,
        method: str,
        pod: Address,
        route: str,
        kind: type[T],
        *,
        body: object | None = None,
        headers: dict[str, str] | None = None,
        seconds: float | None = None,
        operation: str = "",
    ) -> T:
        name = f"{method} {route.replace(operation, '{id}') if operation else route}"
        place = {"k8s.namespace.name": pod.namespace, "k8s.pod.name": pod.pod, "k8s.pod.uid": pod.uid}
        with telemetry.call(name, {telemetry.OPERATION: operation, **place}):
            channel = await self._trust.channel(pod.pod, namespace=pod.namespace, tls=pod.tls)
            sent = {**await self._headers(pod), **(headers or {})}
            telemetry.send(sent)
            data = encode(body) if body is not None else None
            return self._read(*await self._exchange(method, pod, route, data, sent, channel, seconds), pod, kind)

    async def _exchange(
        self,
        method: str,
        pod: Address,
        route: str,
        body: bytes | None,
        headers: dict[str, str],
        channel: Channel,
        seconds: float | None,
    ) -> tuple[int, bytes]:
        total = seconds or self._timeouts.call
        try:
            async with (
                asyncio.timeout(total),
                self._open().request(
                    method,
                    pod.url + route,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    ssl=channel.context,
                    server_hostname=channel.server_name,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect),
                ) as response,
            ):
                return response.status, await _bounded(response)
        except TimeoutError:
            raise EngineTimeout(
                f"pod {pod.pod} did not answer {method} {route} at {pod.ip}:{pod.port} in {total:g} s",
                advice="check the pod's load and its logs",
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _no_connection(error, pod, channel) from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineFailed("the client is closed")
        return self._session

    async def _headers(self, pod: Address) -> dict[str, str]:
        token = await self._tokens.token(pod.uid)
        sent = {"Content-Type": "application/json"}
        return sent if token is None else {**sent, "Authorization": f"Bearer {token}"}

    def _read(self, status: int, data: bytes, pod: Address, kind: type[T]) -> T:
        try:
            if 200 <= status < 300:
                return decode(data, kind)
            error = decode_error(data)
        except BadRequest as wrong:
            raise EngineFailed(
                f"pod {pod.pod} answered HTTP {status} with something that is not this protocol: {wrong.message}",
                advice="check that the port named modelswap is the sidecar's control port",
            ) from None
        if isinstance(error, Unauthenticated):
            self._tokens.forget(pod.uid)
        raise error


def _no_connection(error: Exception, pod: Address, channel: Channel) -> Unavailable:
    if not isinstance(error, aiohttp.ClientSSLError):
        return EngineUnreachable(
            f"no connection to pod {pod.pod} at {pod.ip}:{pod.port}: {error}",
            advice="check that the pod listens on its control port, and NetworkPolicies",
        )
    # What OpenSSL found, without the address that is said beside it.
    cause = error.certificate_error if isinstance(error, aiohttp.ClientConnectorCertificateError) else error.os_error
    found = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or str(cause)
    return EngineTlsRefused(
        f"pod {pod.pod} at {pod.ip}:{pod.port} did not prove that it is {channel.server_name}: {found}",
        advice="compare its certificate with the operator's controlTls.ca and controlTls.serverName",
    )


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    data = await response.content.read(BODY_LIMIT + 1)
    parts = [data]
    size = len(data)
    while data:
        if size > BODY_LIMIT:
            raise EngineFailed(f"the answer is larger than {BODY_LIMIT} bytes")
        data = await response.content.read(BODY_LIMIT + 1 - size)
        parts.append(data)
        size += len(data)
    return b"".join(parts)
