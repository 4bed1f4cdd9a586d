"""Allow-lists of prefixes: exactly the folder, and nothing that two readers could read in two ways."""

import pytest

from modelswap_engine.protocol.errors import SourceNotAllowed
from modelswap_engine.sources.allowed import Allowed


@pytest.mark.parametrize(
    ("prefix", "uri"),
    [
        ("s3://bucket/models", "s3://bucket/models"),
        ("s3://bucket/models/", "s3://bucket/models/chat/1.1/"),
        ("s3://bucket", "s3://bucket/anything/at/all"),
        ("S3://bucket/models", "s3://bucket/models/1"),
        ("https://Host.example/m", "https://host.example/m/1"),
        ("hf://org", "hf://org/repo@main"),
        ("hf://org/repo", "hf://org/repo@v1"),
        ("hf://org/repo", "hf://org/repo@v1/sub"),
        ("oci://registry:5000/team/model", "oci://registry:5000/team/model:1.1@sha256:00"),
        ("oci://registry:5000/team/model", "oci://registry:5000/team/model@sha256:00"),
    ],
)
def test_what_is_below_a_prefix_may_be_read(prefix: str, uri: str) -> None:
    Allowed([prefix]).check(uri)


@pytest.mark.parametrize(
    ("prefix", "uri"),
    [
        ("s3://bucket/models", "s3://bucket/models-private/1"),
        ("s3://bucket/models", "s3://bucket"),
        ("s3://bucket/models", "s3://other/models/1"),
        ("s3://bucket/models", "gs://bucket/models/1"),
        ("s3://bucket/models", "s3://bucket/models/../private"),
        ("s3://bucket/models", "s3://bucket/models/%2e%2e/private"),
        ("s3://bucket/models", "s3://bucket/models/..%2Fprivate"),
        ("s3://bucket/models", "s3://bucket/models//1"),
        ("s3://bucket/models", "s3://bucket/models/./1"),
        ("s3://bucket/models", "s3://bucket/models/1\n"),
        ("s3://bucket/models", "s3://bucket/models\\1"),
        ("s3://bucket", "s3://bucket@elsewhere/1"),
        ("https://host/m", "https://host/m/1?X-Signature=abc"),
        ("https://host/m", "https://host/m/1#part"),
        ("https://host/m", "https://user:word@host/m/1"),
        ("hf://org/repo", "hf://org/repo-private@main"),
        ("hf://org/repo", "hf://org"),
        ("oci://registry/m", "oci://registry/model:1"),
        ("s3://bucket/models", "s3:///models"),
        ("s3://bucket/models", "models"),
    ],
)
def test_nothing_else_may(prefix: str, uri: str) -> None:
    with pytest.raises(SourceNotAllowed):
        Allowed([prefix]).check(uri)


def test_without_a_prefix_nothing_may_be_read() -> None:
    with pytest.raises(SourceNotAllowed, match="not below a source"):
        Allowed([]).check("s3://bucket/m")


def test_credentials_are_those_of_the_longest_prefix() -> None:
    allowed = Allowed(["s3://bucket"], credentials=[("all", "s3://bucket"), ("team", "s3://bucket/team")])
    uris = ["s3://bucket/team/chat", "s3://bucket/teamwork", "s3://other/team"]
    assert [allowed.credentials(uri) for uri in uris] == ["team", "all", ""]


@pytest.mark.parametrize("uri", ["https://host/m?token=sesame", "https://user:sesame@host/m"])
def test_secrets_are_not_repeated(uri: str) -> None:
    with pytest.raises(SourceNotAllowed) as refused:
        Allowed(["https://host"]).check(uri)
    assert "sesame" not in str(refused.value.body())
