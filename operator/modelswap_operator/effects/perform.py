"""Carrying out one action. Answers what failed as values; only the API server's refusals are raised."""

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import replace

from modelswap_engine.protocol.adapter_calls import ResolvedAdapters
from modelswap_engine.protocol.errors import ErrorBody, ModelswapError
from modelswap_engine.protocol.looking import SourceLook
from modelswap_engine.protocol.messages import CancelRequest, Fence, Plan, ProceedRequest, SwapStatus
from modelswap_operator.effects import assignment
from modelswap_operator.effects.engine_client import EngineClient
from modelswap_operator.effects.kube import Kube
from modelswap_operator.effects.observe import Look, address
from modelswap_operator.planning.actions import (
    AdapterOrder,
    CancelSwaps,
    FailedAttempt,
    LookAtSource,
    PlanOrder,
    RenewHolds,
    ResolveOrder,
    SendAdapters,
    SendPrefetch,
    StartSwaps,
    SwapOrder,
    UntoldPod,
    WriteAssignment,
)


class Performer:
    """Does what was decided."""

    def __init__(self, *, kube: Kube, engines: EngineClient) -> None:
        self._kube = kube
        self._engines = engines

    async def publish(self, look: Look, action: WriteAssignment) -> None:
        """Write the assignment on the version it was decided on.

        Raises:
            ApiError: it was not written.
        """
        await assignment.publish(
            self._kube,
            namespace=look.snapshot.namespace,
            slot=look.snapshot.slot,
            assignment=action.assignment,
            ledger=action.ledger,
            uid=look.configmap_uid,
            resource_version=look.configmap_version,
        )

    async def start(self, action: StartSwaps) -> tuple[FailedAttempt, ...]:
        """Start swaps on all pods at once; return those that were not accepted."""
        return await _failed(
            (
                FailedAttempt(
                    pod=order.pod,
                    operation_id=order.request.operation_id,
                    revision=order.request.fence.revision,
                    digest=order.request.target.digest,
                    error=_UNKNOWN,
                ),
                self._swap(order),
            )
            for order in action.orders
        )

    def _swap(self, order: SwapOrder) -> Awaitable[SwapStatus]:
        pod, wanted = address(order.pod), order.request
        if not order.goes_on:
            return self._engines.swap(pod, wanted, if_match=order.if_match)
        request = ProceedRequest(fence=wanted.fence, peers_ready=wanted.traffic.peers_ready)
        return self._engines.proceed(pod, wanted.operation_id, request)

    async def renew(self, action: RenewHolds) -> tuple[FailedAttempt, ...]:
        """Renew leases on all pods at once; return those that were not."""
        return await _failed(
            (
                FailedAttempt(
                    pod=order.pod,
                    operation_id=order.operation_id,
                    revision=order.request.fence.revision,
                    digest="",
                    error=_UNKNOWN,
                ),
                self._engines.hold(address(order.pod), order.operation_id, order.request),
            )
            for order in action.orders
        )

    async def prefetch(self, action: SendPrefetch) -> tuple[FailedAttempt, ...]:
        """Tell all pods at once what to fetch ahead; return those that could not be told."""
        return await _failed(
            (
                FailedAttempt(
                    pod=order.pod,
                    operation_id="",
                    revision=order.request.fence.revision,
                    digest="",
                    error=_UNKNOWN,
                ),
                self._engines.prefetch(address(order.pod), order.request),
            )
            for order in action.orders
        )

    async def cancel(self, look: Look, action: CancelSwaps) -> tuple[FailedAttempt, ...]:
        """Cancel operations on all pods at once; return those that were not."""
        snapshot = look.snapshot
        return await _failed(
            (
                FailedAttempt(
                    pod=order.pod,
                    operation_id=order.operation_id,
                    revision=order.revision,
                    digest="",
                    error=_UNKNOWN,
                ),
                self._engines.cancel(
                    address(order.pod),
                    order.operation_id,
                    CancelRequest(
                        fence=Fence(
                            pod_uid=order.pod.uid,
                            owner_uid=snapshot.uid,
                            epoch=snapshot.epoch,
                            revision=order.revision,
                        )
                    ),
                ),
            )
            for order in action.orders
        )

    async def ask(self, order: PlanOrder) -> Plan | ErrorBody:
        """Ask one pod for a plan."""
        try:
            return await self._engines.plan(address(order.pod), order.request)
        except ModelswapError as error:
            return error.body()

    async def look(self, action: LookAtSource) -> SourceLook | ErrorBody:
        """Ask one pod whether the source still holds what it serves."""
        ask = self._engines.look_at_adapter if action.adapter else self._engines.look
        try:
            return await ask(address(action.pod), action.request)
        except ModelswapError as error:
            return error.body()

    async def tell(self, action: SendAdapters) -> tuple[UntoldPod, ...]:
        """Tell all pods at once which adapters are assigned; return those that could not be told."""

        async def one(order: AdapterOrder) -> UntoldPod | None:
            try:
                await self._engines.assign_adapters(address(order.pod), order.request)
            except ModelswapError as error:
                return UntoldPod(pod=order.pod, revision=order.request.fence.revision, error=error.body())
            return None

        answers = await asyncio.gather(*(one(order) for order in action.orders))
        return tuple(answer for answer in answers if answer is not None)

    async def look_up(self, order: ResolveOrder) -> ResolvedAdapters | ErrorBody:
        """Ask one pod what sources of adapters hold."""
        try:
            return await self._engines.resolve_adapters(address(order.pod), order.request)
        except ModelswapError as error:
            return error.body()


_UNKNOWN = ErrorBody(code="EngineFailed", message="", retryable=True)


async def _failed(calls: Iterable[tuple[FailedAttempt, Awaitable[object]]]) -> tuple[FailedAttempt, ...]:
    """Await all calls at once and return the attempts whose call failed, each with its error."""

    async def one(attempt: FailedAttempt, call: Awaitable[object]) -> FailedAttempt | None:
        try:
            await call
        except ModelswapError as error:
            return replace(attempt, error=error.body())
        return None

    answers = await asyncio.gather(*(one(attempt, call) for attempt, call in calls))
    return tuple(answer for answer in answers if answer is not None)
