"""Several answers to one prompt, as one sequence of pieces: each comes when it is there, with its number.

The answers run side by side in the engine; whoever stops listening ends all of them, and so does the first that fails.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from modelswap_engine.http.openai.answer import Answer, Piece

_Item = tuple[int, Piece | BaseException | None]


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece]]:
    """Yield the pieces of all answers as they come, each with the number of its answer.

    Raises:
        ModelswapError: of the first answer that fails.
    """
    if len(answers) == 1:
        async with aclosing(answers[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    # As many places as answers: one that nobody reads yet waits, as a single one would.
    queue: asyncio.Queue[_Item] = asyncio.Queue(maxsize=len(answers))
    tasks = [asyncio.create_task(_feed(number, answer, queue)) for number, answer in enumerate(answers)]
    open_answers = len(answers)
    try:
        while open_answers:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_answers -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(number: int, answer: Answer, queue: asyncio.Queue[_Item]) -> None:
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                await queue.put((number, piece))
    except Exception as error:  # noqa: BLE001 - handed to who listens, whatever it is
        await queue.put((number, error))
    else:
        await queue.put((number, None))
