"""Who reads the fleet's change policy: what holds before it was read, and when it cannot be."""

import asyncio
from typing import Any

import pytest

from modelswap_operator.effects.kube import ApiError, ApiUnavailable
from modelswap_operator.planning.changes import ChangePolicy
from modelswap_operator.runtime import changes
from modelswap_operator.runtime.changes import ChangeWatch

AWAY = ApiUnavailable(verb="get", path="/", status=503, message="overloaded")
FORBIDDEN = ApiError(verb="get", path="/", status=403, message="forbidden")


class Answers:
    """An API server that gives one answer after the other, and the last one from then on."""

    def __init__(self, *answers: dict[str, Any] | ApiError | None) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def get(self, path: str) -> dict[str, Any] | None:
        self.asked.append(path)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, ApiError):
            raise answer
        return answer


def watch(*answers: dict[str, Any] | ApiError | None) -> tuple[ChangeWatch, Answers, list[str]]:
    kube: Any = Answers(*answers)
    told: list[str] = []
    return ChangeWatch(kube, namespace="home", changed=lambda: told.append("changed")), kube, told


async def test_a_change_is_told_once_and_what_cannot_be_read_stays_as_it_was() -> None:
    frozen = {"data": {"freeze": "true", "reason": "year end"}}
    reader, kube, told = watch(None, frozen, AWAY, frozen, None)
    policies = []
    for _ in range(5):
        await reader.look()
        policies.append(reader.policy().frozen)
    assert policies == [False, True, True, True, False]
    assert len(told) == 3  # read at all, frozen, lifted
    assert set(kube.asked) == {"/api/v1/namespaces/home/configmaps/changes.modelswap.dev"}


async def test_until_it_was_read_nothing_may_change() -> None:
    reader, _, told = watch(AWAY)
    await reader.look()
    assert "has not been read yet" in reader.policy().wrong
    assert told == []


@pytest.mark.parametrize("answer", [None, FORBIDDEN, {}])
async def test_without_a_policy_or_the_right_to_read_it_nothing_is_held_back(
    answer: dict[str, Any] | ApiError | None,
) -> None:
    reader, _, _ = watch(answer)
    await reader.look()
    assert reader.policy() == ChangePolicy()


async def test_a_right_that_is_lost_for_a_moment_lifts_no_freeze() -> None:
    reader, _, _ = watch({"data": {"freeze": "true"}}, FORBIDDEN)
    await reader.look()
    await reader.look()
    assert reader.policy().frozen


async def test_an_answer_that_is_none_is_outlived(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, kube, _ = watch({"data": {"freeze": "true"}})
    passes = 0

    async def get(path: str) -> dict[str, Any]:
        nonlocal passes
        passes += 1
        if passes == 1:
            raise ValueError("not JSON")
        raise asyncio.CancelledError

    monkeypatch.setattr(kube, "get", get)
    monkeypatch.setattr(changes, "POLL_SECONDS", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await reader.run()
    assert passes == 2
