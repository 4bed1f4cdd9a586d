"""Blocking reads of one mount, in threads of its own: a server that is gone takes those, and nobody else's.

A thread that hangs in the kernel cannot be ended, so whoever gives up leaves it behind, and its turn with it until it
comes back. The threads are no reason for the process to stay.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE: Final = 8


class MountThreads:
    """Calls of one event loop that may block.

    Args:
        name: of the threads, for who looks at the process.
        at_once: how many calls are made at the same time; others wait in turn.
    """

    def __init__(self, name: str, *, at_once: int = AT_ONCE) -> None:
        self._name, self._turns = name, asyncio.Semaphore(at_once)

    async def run(self, call: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        """Return what a call returns; a caller that is cancelled waits no longer, and the call goes on."""
        await self._turns.acquire()  # whoever is called gives it back, and not the caller
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        work = partial(copy_context().run, partial(call, *arguments, **keywords))
        threading.Thread(target=self._work, args=(loop, work, answer), name=self._name, daemon=True).start()
        return await answer

    def _work(self, loop: asyncio.AbstractEventLoop, work: Callable[[], T], answer: asyncio.Future[T]) -> None:
        try:
            told = partial(_result, answer, work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            told = partial(_error, answer, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(self._ended, told)

    def _ended(self, told: Callable[[], None]) -> None:
        told()
        self._turns.release()


def _result(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _error(answer: asyncio.Future[T], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
