"""Each kind of server as a place that versions lie in, for all tests of sources."""

from tests.support.servers.places import hub_place, place, registry_place, web_place

__all__ = ["hub_place", "place", "registry_place", "web_place"]
