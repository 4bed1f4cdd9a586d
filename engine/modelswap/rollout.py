"""Pointing a ModelVersion at a published version, and waiting for it, through the Kubernetes API.

Only ``spec.version`` and ``spec.source`` are applied, under a field manager of its own: whoever else owns these fields
(a GitOps tool, kubectl) is named instead of overruled. The Kubernetes client is imported when it is used.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from modelswap_engine.protocol.errors import BadRequest, ModelswapError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

FIELD_MANAGER: Final = "modelswap-trainer"
_KIND: Final = ("modelswap.dev", "v1alpha1")
_PLURAL: Final = "modelversions"
_APPLY: Final = "application/apply-patch+yaml"
_REQUEST: Final = 15.0
_WATCH: Final = 30
"""Seconds that a watch lasts at most: a connection that is silently gone is noticed."""
_PAUSE: Final = 1.0
_GONE: Final = 404
_ADVICE: Final = {
    403: "give its service account the verbs get, watch, list and patch on modelversions.modelswap.dev",
    404: "create the ModelVersion first; a trainer only changes its version",
    409: "somebody else owns these fields: change it there (Git), or take them over with force=True",
    422: "correct the values; a new version needs a new label and another source",
}
Json = dict[str, Any]


class BumpFailed(ModelswapError):
    """The API server did not do what it was asked; ``message`` has its words, ``http_status`` is 0 for no answer."""

    code: ClassVar[str] = "BumpFailed"
    status: ClassVar[int] = 409

    def __init__(self, message: str, *, advice: str = "", http_status: int = 0) -> None:
        super().__init__(message, advice=advice)
        self.http_status = http_status

    @property
    def passing(self) -> bool:
        """Say whether the same may succeed later."""
        return self.http_status in {0, 410, 429} or self.http_status >= 500


class NotServed(ModelswapError):
    """The version is not served: it was refused, replaced, or did not come in time.

    ``reason`` is that of the ModelVersion's condition, or ``Superseded``, ``Deleted``, ``DeadlineExceeded``.
    """

    code: ClassVar[str] = "NotServed"
    status: ClassVar[int] = 409

    def __init__(self, message: str, *, reason: str, advice: str = "") -> None:
        super().__init__(message, advice=advice, details={"reason": reason})
        self.reason = reason


class Bumped(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a ModelVersion's spec, as the API server stored it."""

    model_version: str
    namespace: str
    uid: str
    generation: int
    version: str


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What is Ready: ``pods`` serve the version, by ``message`` of the condition; ``seconds`` were waited."""

    digest: str
    pods: int
    reason: str
    message: str
    seconds: float


def bump(
    *,
    model_version: str,
    namespace: str,
    version: str,
    uri: str,
    digest: str = "",
    force: bool = False,
    field_manager: str = FIELD_MANAGER,
    api: "ApiClient | None" = None,
) -> Bumped:
    """Point a ModelVersion at a published version.

    Args:
        model_version: its name; it must be there.
        namespace: its namespace.
        version: the new label.
        uri: where the version was published.
        digest: its digest: pods refuse anything else.
        force: take the fields over from whoever owns them.
        field_manager: in whose name.
        api: a client; without, that of the pod's service account, else of the kubeconfig.

    Raises:
        BumpFailed: there is no such object, no right, another owner of the fields, or the API refuses the values.
    """
    objects = _Objects(api)
    uid = str(objects.get(namespace, model_version)["metadata"]["uid"])
    source = {"uri": uri} | ({"digest": digest} if digest else {})
    body = {
        "apiVersion": "/".join(_KIND),
        "kind": "ModelVersion",
        "metadata": {"name": model_version, "namespace": namespace, "uid": uid},  # never one that was made meanwhile
        "spec": {"version": version, "source": source},
    }
    stored = objects.apply(namespace, model_version, body, manager=field_manager, force=force)
    return Bumped(
        model_version=model_version,
        namespace=namespace,
        uid=uid,
        generation=int(stored["metadata"]["generation"]),
        version=version,
    )


def wait_until_served(bumped: Bumped, *, timeout: float = 600.0, api: "ApiClient | None" = None) -> Served:
    """Wait until the ModelVersion is Ready at the generation of a bump.

    Args:
        bumped: what :func:`bump` returned.
        timeout: seconds.
        api: see :func:`bump`.

    Raises:
        NotServed: it was refused, somebody changed the spec again, it was deleted, or time is up.
        BumpFailed: the object may not be read.
    """
    began = time.monotonic()
    last = "nothing was heard of it"
    for thing in _Objects(api).follow(bumped.namespace, bumped.model_version, until=began + timeout):
        found = verdict(thing, bumped)
        if isinstance(found, Served):
            return msgspec.structs.replace(found, seconds=time.monotonic() - began)
        last = found
    raise NotServed(
        f"{bumped.namespace}/{bumped.model_version}: {bumped.version} is not served after {timeout:g} s: {last}",
        reason="DeadlineExceeded",
        advice=f"kubectl describe modelversion {bumped.model_version} -n {bumped.namespace}",
    )


def verdict(thing: Mapping[str, Any] | None, bumped: Bumped) -> Served | str:
    """Judge a ModelVersion: it serves, or why not yet.

    Raises:
        NotServed: it never will.
    """
    name = f"{bumped.namespace}/{bumped.model_version}"
    if thing is None or thing["metadata"]["uid"] != bumped.uid or thing["metadata"].get("deletionTimestamp"):
        raise NotServed(f"{name} was deleted", reason="Deleted")
    status = thing.get("status") or {}
    if thing["metadata"]["generation"] > bumped.generation:
        raise NotServed(
            f"{name} was changed again, to {thing['spec'].get('version')}, before {bumped.version} was served",
            reason="Superseded",
        )
    conditions = {
        condition["type"]: condition
        for condition in status.get("conditions") or []
        if condition.get("observedGeneration") == bumped.generation
    }
    ready, stalled = conditions.get("Ready"), conditions.get("Stalled")
    if stalled is not None and stalled["status"] == "True":
        reason = ready["reason"] if ready is not None and ready["status"] == "False" else stalled["reason"]
        raise NotServed(f"{name}: {bumped.version} is not served, {reason}: {stalled['message']}", reason=reason)
    if ready is None:
        return "the operator has not looked at it yet"
    if ready["status"] != "True":
        return f"{ready['reason']}: {ready['message']}"
    return Served(
        digest=(status.get("target") or {}).get("digest", ""),
        pods=(status.get("podCounts") or {}).get("ready", 0),
        reason=ready["reason"],
        message=ready["message"],
        seconds=0.0,
    )


class _Objects:
    """ModelVersions at the API server."""

    def __init__(self, api: "ApiClient | None") -> None:
        try:
            from kubernetes import client
        except ModuleNotFoundError as error:
            raise BadRequest(f"this needs the package {error.name}", advice="pip install kubernetes") from None
        self._api: Any = client.CustomObjectsApi(api or client.ApiClient(_configuration()))

    def get(self, namespace: str, name: str) -> Json:
        return self._call("read", "get_namespaced_custom_object", namespace, name)

    def apply(self, namespace: str, name: str, body: Json, *, manager: str, force: bool) -> Json:
        options = {"body": body, "field_manager": manager, "force": force, "_content_type": _APPLY}
        return self._call("changed", "patch_namespaced_custom_object", namespace, name, **options)

    def follow(self, namespace: str, name: str, *, until: float) -> Iterator[Json | None]:
        """Yield an object as it is and as it changes, None when it is gone; what passes at the server is got over."""
        while (left := until - time.monotonic()) > 0:
            try:
                thing = self.get(namespace, name)
                yield thing
                yield from self._changes(thing, seconds=max(1, min(_WATCH, int(left))))
            except BumpFailed as error:
                if error.http_status == _GONE:
                    yield None
                elif not error.passing:
                    raise
                time.sleep(min(_PAUSE, max(0.0, until - time.monotonic())))

    def _changes(self, thing: Json, *, seconds: int) -> Iterator[Json]:
        from kubernetes import watch

        metadata = thing["metadata"]
        with _told("watched", f"{metadata['namespace']}/{metadata['name']}"):
            for event in watch.Watch().stream(
                self._api.list_namespaced_custom_object,
                *_KIND,
                metadata["namespace"],
                _PLURAL,
                field_selector=f"metadata.name={metadata['name']}",
                resource_version=metadata["resourceVersion"],
                timeout_seconds=seconds,
                _request_timeout=(_REQUEST, seconds + _REQUEST),
            ):
                if event["type"] == "DELETED":
                    return
                yield event["object"]

    def _call(self, verb: str, method: str, namespace: str, name: str, **options: Any) -> Json:
        with _told(verb, f"{namespace}/{name}"):
            found: Json = getattr(self._api, method)(
                *_KIND, namespace, _PLURAL, name, _request_timeout=_REQUEST, **options
            )
        return found


def _configuration() -> Any:
    from kubernetes import client, config

    found = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=found)
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=found)
        except (config.ConfigException, OSError) as error:
            raise BumpFailed(
                f"no API server is known: {error}", advice="run it in a pod with a service account, or set KUBECONFIG"
            ) from None
    return found


@contextmanager
def _told(verb: str, name: str) -> Iterator[None]:
    """Turn the client's errors into ours."""
    from kubernetes.client import exceptions
    from urllib3.exceptions import HTTPError

    try:
        yield
    except exceptions.ApiException as error:
        status = int(error.status or 0)
        raise BumpFailed(
            f"modelversion {name} cannot be {verb}: {_words(error)}" + (f" (HTTP {status})" if status else ""),
            advice=_ADVICE.get(status, ""),
            http_status=status,
        ) from None
    except (HTTPError, OSError) as error:
        raise BumpFailed(f"modelversion {name} cannot be {verb}: {type(error).__name__}", http_status=0) from None


def _words(error: Any) -> str:
    """Return the API server's own words, where it answered with a Status object."""
    try:
        return str(json.loads(error.body)["message"])[:1024]
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
