"""A way to a real API server that fails when a test says so: by refusing connections, by errors, or by silence.

Stands for a control plane in trouble, which a test cannot bring about in the server itself. Open watches are cut when
trouble begins, as they are when a server ends. Refuses to know who asks for what.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import yarl
from aiohttp import web

from tests.support.apiserver import ApiServer

_HOST = "127.0.0.1"
_HOP_BY_HOP = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")


class WeakApi:
    """Passes requests on as one user, while there is no trouble."""

    def __init__(self, server: ApiServer, *, user: str, kubeconfig: Path) -> None:
        self._server = server.url
        self._context = _credentials(server, server.kubeconfig_of(user))
        self.kubeconfig = kubeconfig
        self._status = 0
        self._port = 0
        self._handling: set[asyncio.Task[object]] = set()
        self._open: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        self._frozen: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Listen, and write the kubeconfig that leads here."""
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._context, limit=0))
        await self._listen()
        self.kubeconfig.write_text(json.dumps(_config(f"http://{_HOST}:{self._port}")))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop."""
        await self.refuse()
        if self._session is not None:
            await self._session.close()

    async def answer_with(self, status: int) -> None:
        """From now on answer every request with this error."""
        self._status = status
        await self._cut()

    async def refuse(self) -> None:
        """From now on refuse connections."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await self._cut()
            await runner.cleanup()

    def freeze(self) -> None:
        """From now on connections that are open carry nothing, and stay open; new ones work.

        So does a middle box that has forgotten them.
        """
        self._frozen.update(self._open)

    async def heal(self) -> None:
        """End the trouble."""
        self._status = 0
        if self._runner is None:
            await self._listen()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, _HOST, self._port, reuse_address=True).start()
        self._port = int(self._runner.addresses[0][1])

    async def _cut(self) -> None:
        for task in list(self._handling):
            task.cancel()
        await asyncio.gather(*self._handling, return_exceptions=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self._open.add(request.transport)
        await self._carried(request)
        if self._status:
            body = {"kind": "Status", "apiVersion": "v1", "code": self._status, "message": "the server is in trouble"}
            return web.json_response(body, status=self._status, headers={"Retry-After": "1"})
        task = asyncio.ensure_future(self._pass_on(request))
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)
        return await task

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = yarl.URL(f"{self._server}{request.raw_path}", encoded=True)
        data = await request.read() or None  # an empty body would get a content type
        async with self._session.request(request.method, url, data=data, headers=headers, timeout=None) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await self._carried(request)
                await response.write(chunk)
            await self._carried(request)
            return response

    async def _carried(self, request: web.Request) -> None:
        """Go on, but never on a connection that is frozen."""
        if request.transport in self._frozen:
            await asyncio.Event().wait()


def _config(url: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "weak",
        "clusters": [{"name": "weak", "cluster": {"server": url}}],
        "users": [{"name": "weak", "user": {}}],
        "contexts": [{"name": "weak", "context": {"cluster": "weak", "user": "weak"}}],
    }


def _credentials(server: ApiServer, kubeconfig: Path) -> ssl.SSLContext:
    user = json.loads(kubeconfig.read_text())["users"][0]["user"]
    context = ssl.create_default_context(cafile=str(server.ca))
    pem = kubeconfig.with_suffix(".pem")
    parts = (user["client-key-data"], user["client-certificate-data"])
    pem.write_bytes(b"\n".join(base64.b64decode(part) for part in parts))
    context.load_cert_chain(pem)
    return context
