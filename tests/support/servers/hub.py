"""A hub of models on loopback that speaks the protocol of huggingface_hub, with the answers that its client relies on.

It stands for huggingface.co and its private instances, which are no programs that could be had; the real client is
tried against it (`tests/sources/test_hub.py`). Like the original, it serves small files itself and sends for big ones
to another host, which refuses requests that bring the hub's token along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.servers.hosted import Hosted

TOKEN = "hf_not-a-secret"
_BIG = (".safetensors", ".bin")


@dataclass
class Repository:
    """One repository: its commits by id, and what its branches and tags point to."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    """The token of these tests is not on the list of who was let in."""
    xet: bool = False
    """Big files lie in Xet: who knows of it is told where, who does not is sent to a bridge that serves ranges."""


class Hub:
    """One hub, and beside it the host that hands out big files."""

    def __init__(self) -> None:
        """Start both."""
        self._repositories: dict[str, Repository] = {}
        self._blobs: dict[str, bytes] = {}
        cdn = web.Application()
        cdn.router.add_get("/{sha256}", self._blob)
        cdn.router.add_get("/xet-bridge/{sha256}", self._blob)
        self._cdn = Hosted(cdn)
        app = web.Application()
        app.router.add_get("/api/models/{repo:[^/]+/[^/]+}/revision/{revision:.+}", self._info)
        app.router.add_get("/api/models/{repo:[^/]+/[^/]+}/tree/{revision}{folder:.*}", self._tree)
        app.router.add_get("/api/models/{repo:[^/]+/[^/]+}", self._info)
        app.router.add_get("/{repo:[^/]+/[^/]+}/resolve/{revision}/{path:.+}", self._resolve)
        self._hosted = Hosted(app)
        self.url = self._hosted.url
        self.cdn_url = f"http://localhost:{self._cdn.port}"
        """Where it sends for big files: another name, as in life."""

    def commit(self, repo: str, files: Mapping[str, bytes], *, branch: str = "main") -> str:
        """Let a branch hold exactly these files; return the commit."""
        repository = self.repository(repo)
        before = repository.refs.get(branch, "")
        named = "".join(f"{name} {hashlib.sha1(data).hexdigest()}\n" for name, data in sorted(files.items()))
        commit = hashlib.sha1(f"{before}\n{named}".encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.refs[branch] = commit
        self._blobs |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        return commit

    def repository(self, repo: str) -> Repository:
        """Return a repository, a new one where there is none."""
        return self._repositories.setdefault(repo, Repository())

    def close(self) -> None:
        """Stop."""
        self._hosted.close()
        self._cdn.close()

    def _allowed(self, request: web.Request) -> Repository:
        repository = self._repositories.get(request.match_info["repo"])
        given = request.headers.get("Authorization")
        if given not in {None, f"Bearer {TOKEN}"}:
            raise _refused(401, "", "Invalid credentials in Authorization header")
        if repository is None or (given is None and (repository.private or repository.gated)):
            # What is private is not told from what is not there.
            raise _refused(401, "RepoNotFound" if repository is None or repository.private else "GatedRepo", "Not here")
        if repository.gated and request.match_info.get("path"):
            raise _refused(403, "GatedRepo", "Access to model is restricted and you are not in the authorized list")
        return repository

    def _files(self, request: web.Request) -> tuple[str, dict[str, bytes]]:
        repository = self._allowed(request)
        asked = request.match_info.get("revision", "main")
        commit = repository.refs.get(asked, asked)
        if commit not in repository.commits:
            raise _refused(404, "RevisionNotFound", f"Invalid rev id: {asked}")
        return commit, repository.commits[commit]

    async def _info(self, request: web.Request) -> web.Response:
        commit, files = self._files(request)
        repository = self._repositories[request.match_info["repo"]]
        return web.json_response(
            {
                "id": request.match_info["repo"],
                "sha": commit,
                "private": repository.private,
                "gated": "manual" if repository.gated else False,
                "siblings": [{"rfilename": name} for name in sorted(files)],
            }
        )

    async def _tree(self, request: web.Request) -> web.Response:
        _, files = self._files(request)
        folder = request.match_info["folder"].strip("/")
        inside = {name: data for name, data in sorted(files.items()) if name.startswith(f"{folder}/" if folder else "")}
        return web.json_response([_listed(name, data) for name, data in inside.items()])

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        commit, files = self._files(request)
        path = request.match_info["path"]
        data = files.get(path)
        headers = {"X-Repo-Commit": commit}
        if data is None:
            raise _refused(404, "EntryNotFound", "Entry not found", headers)
        if not path.endswith(_BIG):
            return _bytes(request, data, etag=_git_id(data), headers=headers)
        sha256 = hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256}"', "ETag": f'"{sha256}"'}
        where = f"{self.cdn_url}/{sha256}?X-Amz-Signature=not-a-secret"
        if self._repositories[request.match_info["repo"]].xet:
            where = where.replace(self.cdn_url, f"{self.cdn_url}/xet-bridge")
            linked |= self._in_xet(request, data, commit)
        return web.Response(status=302, headers={**headers, **linked, "Location": where})

    def _in_xet(self, request: web.Request, data: bytes, commit: str) -> dict[str, str]:
        token = f"{self.url}/api/models/{request.match_info['repo']}/xet-read-token/{commit}"
        places = {"xet-auth": token, "xet-reconstruction-info": f"{self.cdn_url}/v1/reconstructions/{_xet_id(data)}"}
        links = ", ".join(f'<{url}>; rel="{name}"' for name, url in places.items())
        return {"X-Xet-Hash": _xet_id(data), "Link": links}

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        if "Authorization" in request.headers or "X-Amz-Signature" not in request.query:
            raise web.HTTPBadRequest(text="only one way to show who you are")
        sha256 = request.match_info["sha256"]
        data = self._blobs[sha256]
        return _bytes(request, data, etag=_xet_id(data) if "/xet-bridge/" in request.path else sha256, headers={})


def _listed(name: str, data: bytes) -> dict[str, Any]:
    listed: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _git_id(data)}
    if name.endswith(_BIG):
        listed["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return listed


def _bytes(request: web.Request, data: bytes, *, etag: str, headers: Mapping[str, str]) -> web.Response:
    asked = request.http_range
    start, stop, _ = asked.indices(len(data))
    head = {**headers, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
    if asked == slice(None, None, 1):
        return web.Response(body=data, headers=head)
    if start >= stop:
        return web.Response(status=416, headers={**head, "Content-Range": f"bytes */{len(data)}"})
    part = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
    return web.Response(status=206, body=data[start:stop], headers={**head, **part})


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _xet_id(data: bytes) -> str:
    # In life a hash of chunks' hashes: 64 hex digits that are not the sha256 of the file.
    return hashlib.sha256(b"xet\0" + data).hexdigest()


def _refused(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> web.HTTPException:
    kinds = {401: web.HTTPUnauthorized, 403: web.HTTPForbidden, 404: web.HTTPNotFound}
    named = {"X-Error-Code": code} if code else {}
    return kinds[status](headers={**(headers or {}), **named, "X-Error-Message": message}, text=message)
