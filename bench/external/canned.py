"""`python -m bench.external.canned upstream|proxy PORT`: what the proxy is measured against, in processes of their own.

The upstream stands in for an engine whose speed is known: each answer begins at once, and its events come at a pace.
The proxy is the product's data port with its coordinator; what it would exchange weights in is in memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from aiohttp import web

PACE_SECONDS: Final = 0.02
"""Between two events of an answer."""
_REQUESTS: Final = 256
_LOOK_SECONDS: Final = 1.0
"""As in production."""


async def _complete(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    loop = asyncio.get_running_loop()
    due = loop.time()
    for number in range(int(asked["max_tokens"])):
        await asyncio.sleep(due - loop.time())
        due += PACE_SECONDS
        event = {"id": "cmpl-1", "object": "text_completion", "model": asked["model"],
                 "choices": [{"index": 0, "text": f" {number}", "finish_reason": None}]}  # fmt: skip
        await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    return answer


async def _upstream() -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    await _until_told(f"http://{host}:{port}")
    await runner.cleanup()


async def _proxy(upstream: str) -> None:
    from tests.support.proxy_ports import open_proxy

    with tempfile.TemporaryDirectory(prefix="modelswap-bench-") as folder:
        async with open_proxy(Path(folder), upstream, max_requests=_REQUESTS, look_seconds=_LOOK_SECONDS) as ports:
            await _until_told(ports.url)


async def _until_told(url: str) -> None:
    """Say where it listens, and stay until the input ends: with whoever started it."""
    print(url, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_upstream() if sys.argv[1] == "upstream" else _proxy(sys.argv[2]))
