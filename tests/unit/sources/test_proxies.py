"""What the environment says about proxies."""

import pytest
from yarl import URL

from modelswap_engine.protocol.errors import BadRequest
from modelswap_engine.sources.web.proxies import Proxies

PROXY = "http://proxy.acme.example:3128"


def asked(url: str, **environment: str) -> str:
    found = Proxies(environment).for_url(URL(url))
    return str(found.url) if found is not None else ""


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("https://a.example/x", {}, ""),
        ("https://a.example/x", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://a.example/x", {"https_proxy": "proxy.acme.example:3128", "HTTPS_PROXY": "http://other"}, PROXY),
        ("https://a.example/x", {"HTTP_PROXY": PROXY}, ""),
        ("http://a.example/x", {"HTTP_PROXY": PROXY, "HTTPS_PROXY": "http://other"}, PROXY),
        ("https://a.example/x", {"ALL_PROXY": PROXY}, PROXY),
        ("https://a.example/x", {"HTTPS_PROXY": "", "ALL_PROXY": " "}, ""),
    ],
)
def test_which_proxy(url: str, environment: dict[str, str], expected: str) -> None:
    assert asked(url, **environment) == expected


@pytest.mark.parametrize(
    ("entry", "direct", "not_direct"),
    [
        ("acme.example", ["acme.example", "hub.acme.example", "ACME.example"], ["notacme.example", "acme.example.org"]),
        (".svc.cluster.local", ["a.b.svc.cluster.local"], ["svc.example"]),
        ("*.acme.example", ["hub.acme.example"], ["hub.example"]),
        ("10.0.0.0/8", ["10.1.2.3"], ["11.0.0.1", "a.example"]),
        ("fd00::/8", ["[fd00::1]"], ["[2001:db8::1]"]),
        ("192.168.0.1", ["192.168.0.1"], ["192.168.0.11"]),
        ("*", ["a.example", "8.8.8.8"], []),
        (" , ", [], ["a.example"]),
    ],
)
def test_what_is_asked_directly(entry: str, direct: list[str], not_direct: list[str]) -> None:
    environment = {"HTTPS_PROXY": PROXY, "NO_PROXY": f"other.example,{entry}"}
    assert [asked(f"https://{host}/", **environment) for host in direct] == [""] * len(direct)
    assert [asked(f"https://{host}/", **environment) for host in not_direct] == [PROXY] * len(not_direct)


def test_a_password_is_for_the_proxy_alone() -> None:
    found = Proxies({"HTTPS_PROXY": "http://tester:not%2Da-secret@proxy:3128/"}).for_url(URL("https://a.example"))
    assert found is not None
    assert (str(found.url), found.secret) == ("http://proxy:3128", "Basic dGVzdGVyOm5vdC1hLXNlY3JldA==")


def test_a_proxy_that_is_none_bothers_only_who_needs_it() -> None:
    found = Proxies({"ALL_PROXY": "socks5://proxy:1080", "HTTPS_PROXY": PROXY, "NO_PROXY": "b.example"})
    assert found.for_url(URL("https://a.example")) is not None
    assert found.for_url(URL("http://b.example")) is None
    with pytest.raises(BadRequest, match="ALL_PROXY is no address"):
        found.for_url(URL("http://a.example"))


@pytest.mark.parametrize("value", ["socks5://user:hunter2@proxy", "http://", "http://user:hunter2@proxy:port", "://"])
def test_what_is_no_proxy_is_refused_without_showing_it(value: str) -> None:
    with pytest.raises(BadRequest, match="HTTPS_PROXY is no address") as caught:
        Proxies({"HTTPS_PROXY": value}).for_url(URL("https://a.example"))
    assert "hunter2" not in str(caught.value)
