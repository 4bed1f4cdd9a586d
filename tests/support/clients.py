"""Clients of a tiny model that can only write lower case as 1.0 and upper case as 1.1, and who wrote their answers.

The clients are the demo's. Refuses to believe what an answer says of itself, and says whether it is true.
"""

import asyncio
from collections.abc import Callable

from demo.answers import Answer, Classifier, mixed_by_digest
from demo.asking import Question, ask_once
from demo.load import Load, country_prompts


def makers(answer: Answer) -> set[str]:
    """Return the versions that show in the text."""
    return {"1.0" if letter.islower() else "1.1" for letter in answer.text if letter.isalpha()}


def honest(answer: Answer) -> bool:
    """Say whether the answer names the versions that made it."""
    named = {span.version for span in answer.spans} if answer.spans else {answer.version}
    return makers(answer) <= named


def two_makers(answer: Answer) -> bool:
    """Say whether two versions made the answer, by its letters or by its own word."""
    return len(makers(answer)) > 1 or mixed_by_digest(answer)


def load_on(
    url: str,
    *,
    streams: int = 4,
    max_tokens: int = 48,
    mixed: Classifier = two_makers,
    prompts: Callable[[int], str] = country_prompts,
) -> Load:
    """Return clients that keep asking; answers have their full length."""
    return Load(
        url, model="tiny", streams=streams, max_tokens=max_tokens, prompts=prompts, mixed=mixed, ignore_eos=True
    )


def asking(url: str, *, tokens: int, begun: asyncio.Event | None = None) -> asyncio.Task[Answer]:
    """Ask for so many tokens, and go on meanwhile; ``begun`` is set when the first is there."""
    question = Question(model="tiny", max_tokens=tokens, ignore_eos=True)
    return asyncio.create_task(ask_once(url, question, begun=begun))
