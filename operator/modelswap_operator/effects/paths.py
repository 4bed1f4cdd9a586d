"""Where objects are on the API server. ``namespace`` None is all namespaces."""

from modelswap_operator.api.labels import GROUP, VERSION


def custom(plural: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Return the path of our kinds."""
    return _path(f"/apis/{GROUP}/{VERSION}", namespace, plural, name, subresource)


def core(plural: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Return the path of pods, configmaps, services and service accounts."""
    return _path("/api/v1", namespace, plural, name, subresource)


def endpoint_slices(namespace: str, name: str = "") -> str:
    """Return the path of EndpointSlices."""
    return _path("/apis/discovery.k8s.io/v1", namespace, "endpointslices", name, "")


def events(namespace: str, name: str = "") -> str:
    """Return the path of Events."""
    return _path("/apis/events.k8s.io/v1", namespace, "events", name, "")


def leases(namespace: str, name: str = "") -> str:
    """Return the path of Leases."""
    return _path("/apis/coordination.k8s.io/v1", namespace, "leases", name, "")


def _path(root: str, namespace: str | None, plural: str, name: str, subresource: str) -> str:
    parts = [root, f"namespaces/{namespace}" if namespace else "", plural, name, subresource]
    return "/".join(part for part in parts if part)
