"""A real OCI registry (the CNCF distribution) on loopback: open, with a password, or with tokens of an issuer.

And what a publisher does to it: blobs and manifests are pushed by the calls of the distribution specification.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from tests.support.free_ports import free_port
from tests.support.servers.issuer import ISSUER, SERVICE, TokenIssuer
from tests.support.servers.listening import listening
from tests.support.tools import source_server

USER = "tester"
PASSWORD = "not-a-secret"
_HASHED = "$2b$04$ZvZQIIO5y2RBCseS/WB09uPIiMMVdJKbhShyoQICJBazKYWuE6lj6"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a manifest."""

    content: bytes
    media_type: str = "application/vnd.cncf.model.weight.v1.raw"
    annotations: Mapping[str, str] = field(default_factory=dict)


class RegistryServer:
    """One registry with its data in a folder.

    Args:
        home: where everything lies.
        access: who may read and write.
    """

    def __init__(self, home: Path, *, access: Literal["open", "password", "token"] = "open") -> None:
        home.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"
        self.issuer = TokenIssuer(home, user=USER, password=PASSWORD) if access == "token" else None
        self._access = access
        config = home / "config.json"
        config.write_text(json.dumps(self._config(home)))
        command = (str(source_server("registry")), "serve", str(config))
        self._child = listening("registry", command, port=port, home=home)

    def close(self) -> None:
        """Stop it."""
        self._child.stop()
        if self.issuer is not None:
            self.issuer.close()

    async def push(
        self, repository: str, tag: str, layers: Sequence[Layer], *, artifact_type: str = "", config: bytes = b"{}"
    ) -> str:
        """Push an artifact of some layers, and return its manifest's digest."""
        async with aiohttp.ClientSession() as session:
            headers = await self.authorized(session, repository)
            kind = f"{artifact_type.replace('manifest', 'config')}" if artifact_type else EMPTY
            described = await self._push_blob(session, headers, repository, Layer(content=config, media_type=kind))
            manifest: dict[str, Any] = {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": described,
                "layers": [await self._push_blob(session, headers, repository, layer) for layer in layers],
            }
            if artifact_type:
                manifest["artifactType"] = artifact_type
            content = json.dumps(manifest).encode()
            where = f"{self.url}/v2/{repository}/manifests/{tag}"
            typed = {**headers, "Content-Type": MANIFEST_TYPE}
            async with session.put(where, data=content, headers=typed) as answer:
                assert answer.status == 201, await answer.text()
                return answer.headers["Docker-Content-Digest"]

    async def _push_blob(
        self, session: aiohttp.ClientSession, headers: Mapping[str, str], repository: str, layer: Layer
    ) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(layer.content).hexdigest()}"
        async with session.post(f"{self.url}/v2/{repository}/blobs/uploads/", headers=headers) as answer:
            assert answer.status == 202, await answer.text()
            where = answer.headers["Location"]
        where += ("&" if "?" in where else "?") + f"digest={digest}"
        async with session.put(where, data=layer.content, headers=headers) as answer:
            assert answer.status == 201, await answer.text()
        described: dict[str, Any] = {"mediaType": layer.media_type, "digest": digest, "size": len(layer.content)}
        return {**described, "annotations": dict(layer.annotations)} if layer.annotations else described

    async def authorized(self, session: aiohttp.ClientSession, repository: str) -> dict[str, str]:
        """Return the headers of who may read and write a repository."""
        if self._access == "open":
            return {}
        basic = aiohttp.encode_basic_auth(USER, PASSWORD)
        if self.issuer is None:
            return {"Authorization": basic}
        asked = {"service": SERVICE, "scope": f"repository:{repository}:pull,push"}
        async with session.get(self.issuer.realm, params=asked, headers={"Authorization": basic}) as answer:
            return {"Authorization": f"Bearer {(await answer.json())['token']}"}

    def _config(self, home: Path) -> dict[str, Any]:
        config: dict[str, Any] = {
            "version": "0.1",
            "log": {"level": "warn", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(home / "data")}},
            "http": {"addr": self.host, "relativeurls": False},
        }
        if self._access == "password":
            passwords = home / "passwords"
            passwords.write_text(f"{USER}:{_HASHED}\n")
            config["auth"] = {"htpasswd": {"realm": "tests", "path": str(passwords)}}
        if self.issuer is not None:
            token = {"realm": self.issuer.realm, "service": SERVICE, "issuer": ISSUER, "jwks": str(self.issuer.keys)}
            config["auth"] = {"token": token}
        return config
