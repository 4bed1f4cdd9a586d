"""What kopf watches, and whom that wakes.

Only ``on.event`` handlers: they store nothing on the objects (no annotations, no finalizers), so there is nothing for
GitOps tools to disagree with and nothing that could hang a deletion. They are coroutines because kopf runs plain
functions in threads, and tasks belong to the loop.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any, Final

import kopf

from modelswap_operator.api.labels import GROUP, LORAADAPTERS, MODELVERSIONS, SLOT_LABEL, VERSION

Wake = Callable[[str, str, str], None]
"""Called with (plural of the kind, namespace, name) of what has to be looked at."""

CONNECT_SECONDS: Final = 5
REQUEST_SECONDS: Final = 20
BACKOFFS: Final = (1, 1, 2, 3, 5, 8)
LAST_BACKOFF: Final = 10


class Patience(Iterable[float]):
    """Pauses between attempts, without an end: an API server that is away is waited for, however long.

    kopf ends the process when the pauses do. With leader election it ends before that, when the Lease is lost.
    """

    def __iter__(self) -> Iterator[float]:
        return chain(BACKOFFS, repeat(LAST_BACKOFF))


def registry(*, wake: Wake, seen: Callable[[str], None]) -> kopf.OperatorRegistry:
    """Return the handlers; ``seen`` is told of each watch event's resource."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers, id="login")
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        # Our own, because kopf would else log in through the official client that is installed beside it.
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(GROUP, VERSION, MODELVERSIONS, registry=handlers, id="modelversion")
    async def modelversion(namespace: str | None, name: str | None, **_: Any) -> None:
        seen(MODELVERSIONS)
        wake(MODELVERSIONS, namespace or "", name or "")

    @kopf.on.event(GROUP, VERSION, LORAADAPTERS, registry=handlers, id="loraadapter")
    async def loraadapter(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
        seen(LORAADAPTERS)
        if slot := (spec.get("modelRef") or {}).get("name"):
            wake(MODELVERSIONS, namespace or "", slot)

    @kopf.on.event("", "v1", "pods", labels={SLOT_LABEL: kopf.PRESENT}, registry=handlers, id="pod")
    async def pod(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        seen("pods")
        wake(MODELVERSIONS, namespace or "", labels[SLOT_LABEL])

    return handlers


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: one process, no peering, no Events from logs, no reading of CRDs or namespaces."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.scanning.disabled = True
    found.peering.standalone = True
    found.networking.connect_timeout = CONNECT_SECONDS
    found.networking.request_timeout = REQUEST_SECONDS
    found.networking.error_backoffs = Patience()
    found.watching.connect_timeout = CONNECT_SECONDS
    found.watching.server_timeout = 300
    found.watching.client_timeout = 330
    found.watching.inactivity_timeout = 70
    found.watching.chunk_size = 500
    found.watching.label_selectors["", "v1", "pods"] = SLOT_LABEL
    found.execution.default_backoff = 5
    found.background.cancellation_polling = 5
    found.process.ultimate_exiting_timeout = None
    found.persistence.finalizer = f"{GROUP}/operator"  # never set; named so that nobody takes it for kopf's
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    return found
