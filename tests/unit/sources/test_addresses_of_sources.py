"""URIs of hubs, registries and web servers, what a manifest names, and which login is a registry's."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelswap_engine.protocol.errors import (
    InvalidCheckpoint,
    SourceDenied,
    SourceNotAllowed,
    SourceUnreadable,
    UnsupportedFormat,
)
from modelswap_engine.sources.credentials import Credentials
from modelswap_engine.sources.https import WebFolders
from modelswap_engine.sources.hub import HubAddress
from modelswap_engine.sources.hub import parse as parse_hub
from modelswap_engine.sources.oci.layout import layout_of
from modelswap_engine.sources.oci.login import secret_of
from modelswap_engine.sources.oci.registries import ArtifactAddress
from modelswap_engine.sources.oci.registries import parse as parse_artifact
from modelswap_engine.sources.web.ranges import WebSettings
from modelswap_engine.sources.web.reach import Reach

DIGEST = f"sha256:{'a' * 64}"
OTHER = f"sha256:{'b' * 64}"
RAW = "application/vnd.cncf.model.weight.v1.raw"


def test_hubs() -> None:
    assert parse_hub("hf://org/chat") == HubAddress("org/chat", "main", "")
    assert parse_hub("hf://Org/Chat-7B.v2@v1.0/sub/dir/") == HubAddress("Org/Chat-7B.v2", "v1.0", "/sub/dir")
    for uri in (
        "hf://chat",
        "hf://org/chat@",
        "hf://org/chat@a b",
        "hf://org/../x",
        "hf://org/chat@main/..",
        "hf:org/c",
    ):
        with pytest.raises(SourceNotAllowed, match="not of the form"):
            parse_hub(uri)


def test_registries() -> None:
    assert parse_artifact("oci://ghcr.io/org/chat:1.0") == ArtifactAddress("ghcr.io", "org/chat", "1.0", "")
    both = parse_artifact(f"oci://registry.corp:5000/a/b/c:1.0@{DIGEST}")
    assert both == ArtifactAddress("registry.corp:5000", "a/b/c", "1.0", DIGEST)
    assert parse_artifact(f"oci://docker.io/chat@{DIGEST}").repository == "library/chat"
    for uri in ("oci://ghcr.io/org/chat", "oci://ghcr.io/Org/chat:1", "oci://ghcr.io/org/chat@sha256:12", "oci://x:1"):
        with pytest.raises(SourceNotAllowed, match="not of the form"):
            parse_artifact(uri)


@pytest.mark.parametrize(
    "uri", ["https://user:pw@host/x", "https://host/x?sig=pw", "https://host/x#pw", "http://host/x"]
)
async def test_web_servers(uri: str) -> None:
    with pytest.raises(SourceNotAllowed) as caught:
        await WebFolders(Credentials(None), WebSettings(reach=Reach())).open(uri, credentials="")
    assert "pw" not in str(caught.value)


Layer = dict[str, Any]


def layer(name: str = "", *, digest: str = DIGEST, kind: str = RAW, size: int = 5, **annotations: Any) -> Layer:
    named = {"org.cncf.model.filepath": name} if name else {}
    return {"mediaType": kind, "digest": digest, "size": size, "annotations": {**named, **annotations}}


def names(*layers: Layer) -> list[str]:
    manifest = json.dumps({"schemaVersion": 2, "layers": list(layers)}).encode()
    return sorted(layout_of(manifest, shown_as="oci://r/m").files)


def test_layers_that_are_files() -> None:
    title = {"org.opencontainers.image.title": "config.json"}
    oras = "application/vnd.oci.image.layer.v1.tar"
    assert names(
        layer("./model.safetensors"),
        layer(**title),
        layer("docs/README.md"),
        layer(),
        layer("code.tar", kind="application/vnd.cncf.model.code.v1.tar"),
        layer("tokenizer.json", kind=oras),
        layer("folder.json", kind=oras, **{"io.deis.oras.content.unpack": "true"}),
    ) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    "kind",
    [
        "application/vnd.cncf.model.weight.v1.tar+zstd",
        "application/vnd.kitops.modelkit.model.v1.tar+gzip",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
    ],
)
def test_weights_in_compressed_archives_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedFormat, match=rf"model\.safetensors \({re.escape(kind)}\)"):
        names(layer("config.json"), layer("model.safetensors", kind=kind))


def test_manifests_that_are_none() -> None:
    with pytest.raises(UnsupportedFormat, match="index"):
        layout_of(b'{"schemaVersion": 2, "manifests": [{}]}', shown_as="oci://r/m")
    for text in (b"", b"<html>", b"[]", b'{"schemaVersion": 2, "layers": [{}]}', b"\xff"):
        with pytest.raises(SourceUnreadable, match="not a manifest"):
            layout_of(text, shown_as="oci://r/m")
    for wrong in (layer("a", digest="sha512:00"), layer("a", size=-1)):
        with pytest.raises(InvalidCheckpoint, match="no sha256 digest"):
            names(wrong)
    with pytest.raises(InvalidCheckpoint, match="two layers"):
        names(layer("a.safetensors"), layer("a.safetensors", digest=OTHER))


def encoded(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def config(**auths: dict[str, str]) -> dict[str, str]:
    return {".dockerconfigjson": json.dumps({"auths": {name.replace("__", "."): auth for name, auth in auths.items()}})}


def test_the_login_of_a_registry() -> None:
    values = config(ghcr__io={"auth": encoded("a", "b:c")}, quay__io={"username": "d", "password": "e"})
    assert secret_of(values, host="ghcr.io") == f"Basic {encoded('a', 'b:c')}"
    assert secret_of(values, host="quay.io") == f"Basic {encoded('d', 'e')}"
    assert secret_of(values, host="other.io") == ""
    assert secret_of({}, host="ghcr.io") == ""
    hub = {".dockerconfigjson": json.dumps({"auths": {"https://index.docker.io/v1/": {"auth": encoded("f", "g")}}})}
    assert secret_of(hub, host="docker.io") == f"Basic {encoded('f', 'g')}"
    for broken in ({".dockerconfigjson": "{"}, config(ghcr__io={"auth": "%"})):
        with pytest.raises(SourceDenied, match="cannot be read"):
            secret_of(broken, host="ghcr.io")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"credHelpers": {"1.dkr.ecr.eu-central-1.amazonaws.com": "ecr-login"}}, "helper ecr-login, a program"),
        ({"credsStore": "desktop"}, "helper desktop, a program"),
        ({"auths": {"1.dkr.ecr.eu-central-1.amazonaws.com": {}}, "credsStore": "pass"}, "helper pass, a program"),
        ({"auths": {"1.dkr.ecr.eu-central-1.amazonaws.com": {"identitytoken": "hunter2"}}}, "an identity token"),
    ],
)
def test_programs_that_would_make_a_login_are_refused_by_name(config: dict[str, Any], what: str) -> None:
    host = "1.dkr.ecr.eu-central-1.amazonaws.com"
    with pytest.raises(SourceDenied, match=what) as caught:
        secret_of({".dockerconfigjson": json.dumps(config)}, host=host)
    assert "hunter2" not in str(caught.value)
    logins = {"auths": {host: {"auth": encoded("a", "b")}, "other.io": {"auth": encoded("c", "d")}}}
    assert secret_of({".dockerconfigjson": json.dumps(config | logins)}, host=host) == f"Basic {encoded('a', 'b')}"
    del logins["auths"][host]
    rest = {key: value for key, value in config.items() if key != "credHelpers"}
    assert secret_of({".dockerconfigjson": json.dumps(rest | logins)}, host=host) == "", "it is of other registries"


def test_keys_that_begin_with_a_dot_are_mounted_ones(tmp_path: Path) -> None:
    folder = tmp_path / "pull"
    (folder / "..2026_11_30").mkdir(parents=True)
    (folder / "..version").write_text("x")
    (folder / ".dockerconfigjson").write_text("{}\n")
    assert Credentials(tmp_path).read("pull") == {".dockerconfigjson": "{}"}
