"""The API server: the few requests this operator makes, on the official client's asyncio transport.

Paths are written out instead of discovered: every resource is known, and discovery would cost start-up time, a cache
file on disk and requests. Whatever fails comes out as an :class:`ApiError` that names the object and the cause.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import DynamicApiError

from modelswap_operator.api.labels import FIELD_MANAGER

Json = dict[str, Any]
Observer = Callable[[str, str, float], None]
"""Told of every request: method, status code (or ``error``), seconds."""

REQUEST_SECONDS = 15.0
PAGE = 500
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The API server refused or failed a request; ``status`` 0 means that it was not reached."""

    def __init__(self, *, verb: str, path: str, status: int, message: str) -> None:
        super().__init__(f"{verb} {path}: {message}" + (f" (HTTP {status})" if status else ""))
        self.status = status
        self.message = message


class ApiConflict(ApiError):
    """Somebody else changed the object since it was read (409)."""


class ApiNotFound(ApiError):
    """There is no such object (404)."""


class ApiUnavailable(ApiError):
    """The API server was not reached, or is overloaded (0, 429, 5xx)."""


def _api_error(verb: str, path: str, status: int, message: str) -> ApiError:
    kind: type[ApiError] = {404: ApiNotFound, 409: ApiConflict}.get(status, ApiError)
    if status in (0, 429) or status >= 500:
        kind = ApiUnavailable
    return kind(verb=verb, path=path, status=status, message=message)


async def load_configuration(kubeconfig: Path | None) -> client.Configuration:
    """Return how to reach the API server: the named kubeconfig, else the service account, else ``$KUBECONFIG``."""
    found = client.Configuration()
    if kubeconfig is None:
        try:
            config.load_incluster_config(client_configuration=found)
        except config.ConfigException:
            await config.load_kube_config(client_configuration=found)
    else:
        await config.load_kube_config(config_file=str(kubeconfig), client_configuration=found)
    # Proxy variables meant for the internet must not carry tokens elsewhere.
    found.client_session_kwargs = {"trust_env": False}
    return found


class Kube:
    """Requests to the API server; an async context manager that owns the connections."""

    def __init__(self, configuration: client.Configuration, *, observe: Observer | None = None) -> None:
        self.client = client.ApiClient(configuration)
        self._dynamic = DynamicClient(self.client)
        self._observe = observe

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.close()

    async def request(self, verb: str, path: str, *, body: Json | None = None, **params: Any) -> Json:
        """Make one request and return the answer's JSON.

        Raises:
            ApiError: it was refused or failed.
        """
        began, code = time.monotonic(), "error"
        try:
            response = await self._dynamic.request(
                verb, path, body=body, serialize=False, _request_timeout=REQUEST_SECONDS, **params
            )
            code = str(response.status)
            return dict(json.loads(await response.read()))
        except (ApiException, DynamicApiError) as error:
            code = str(error.status)
            raise _api_error(verb, path, int(error.status or 0), _message(error)) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _api_error(verb, path, 0, f"{type(error).__name__}: {error}") from None
        finally:
            if self._observe is not None:
                self._observe(verb.upper(), code, time.monotonic() - began)

    async def get(self, path: str) -> Json | None:
        """Read one object; None when it does not exist."""
        try:
            return await self.request("get", path)
        except ApiNotFound:
            return None

    async def list(
        self, path: str, *, label_selector: str | None = None, field_selector: str | None = None
    ) -> list[Json]:
        """Read all objects of a collection, page by page."""
        items: list[Json] = []
        query: dict[str, Any] = {
            "limit": PAGE,
            "label_selector": label_selector,
            "field_selector": field_selector,
        }
        while True:
            answer = await self.request("get", path, **query)
            items += answer.get("items") or []
            query["_continue"] = (answer.get("metadata") or {}).get("continue")
            if not query["_continue"]:
                return items

    async def apply(self, path: str, body: Mapping[str, Any]) -> Json:
        """Server-side apply as this operator's field manager, taking over what it claims."""
        return await self.request(
            "patch",
            path,
            body=dict(body),
            content_type=APPLY,
            field_manager=FIELD_MANAGER,
            force_conflicts=True,
        )

    async def create(self, path: str, body: Mapping[str, Any]) -> Json:
        """Create an object."""
        return await self.request("post", path, body=dict(body), field_manager=FIELD_MANAGER)

    async def merge(self, path: str, body: Mapping[str, Any]) -> Json:
        """Merge-patch an object."""
        return await self.request("patch", path, body=dict(body), content_type=MERGE, field_manager=FIELD_MANAGER)

    async def delete(self, path: str, *, uid: str) -> None:
        """Delete the object that has this UID; one of another UID, or none, is left alone."""
        try:
            await self.request("delete", path, body={"preconditions": {"uid": uid}})
        except (ApiNotFound, ApiConflict):
            return

    async def replace(self, path: str, body: Mapping[str, Any]) -> Json:
        """Replace an object; with its resourceVersion inside this is a compare-and-swap."""
        return await self.request("put", path, body=dict(body))


def _message(error: ApiException | DynamicApiError) -> str:
    """Return the API server's own words, when it answered with a Status object."""
    body = error.body
    try:
        return str(json.loads(body)["message"])[:1024] if body else str(error.reason)
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
