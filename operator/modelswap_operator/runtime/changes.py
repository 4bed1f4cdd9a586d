"""The fleet's change policy, as the ConfigMap beside the operator has it: read now and then, one read for all slots."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import structlog

from modelswap_operator.api.labels import CHANGES_NAME
from modelswap_operator.effects import paths
from modelswap_operator.effects.kube import ApiError, Kube
from modelswap_operator.planning.changes import ChangePolicy, parse

POLL_SECONDS = 5.0

_log = structlog.get_logger(__name__)


class ChangeWatch:
    """Keeps the policy; until it was read once nothing may change."""

    def __init__(self, kube: Kube, *, namespace: str, changed: Callable[[], None]) -> None:
        self._kube = kube
        self._path = paths.core("configmaps", namespace, CHANGES_NAME)
        self._changed = changed
        self._policy = ChangePolicy(wrong="the change policy has not been read yet")
        self._read = False

    def policy(self) -> ChangePolicy:
        """Return it as it was read last."""
        return self._policy

    async def run(self) -> None:
        """Read it until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - what holds changes back must outlive any answer that is none
                _log.exception("the change policy could not be read; it stays as it was")
            await asyncio.sleep(POLL_SECONDS)

    async def look(self) -> None:
        """Read it once. What cannot be read stays as it was; where there never was a right to, there is no policy."""
        try:
            body = await self._kube.get(self._path)
            found, self._read = parse((body or {}).get("data") or {}), True
        except ApiError as error:
            # A right that is lost for a moment (an upgrade, a server that has just begun) must not lift a freeze.
            if self._read or error.status != HTTPStatus.FORBIDDEN:
                return
            found = ChangePolicy()
        if found != self._policy:
            _log.info("change policy", frozen=found.frozen, windows=len(found.windows), wrong=found.wrong)
            self._policy = found
            self._changed()
