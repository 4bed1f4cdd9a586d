"""The hook in SGLang's first process: what its weights are called follows from what all of its ranks have proved."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import Reply
from modelswap_engine.backends.sglang.plugin import label
from modelswap_engine.backends.sglang.words import ACTION, ANSWER
from modelswap_engine.protocol.errors import Internal


class Front:
    """Has SGLang's own name for it."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _update_weight_version_if_provided(self, version: str) -> None:
        self.called.append(version)


def answered(rank: int, *, digest: str = "new", proved: bool = True, failed: bool = False) -> str:
    error = Internal("told to fail").body() if failed else None
    reply = Reply(operation_id="op", rank=rank, boot_id=f"boot-{rank}", digest=digest, error=error)
    return wire.encode_answer(wire.Answer(number=7, reply=reply, proved=proved))


async def asked(front: object, sums: Sequence[dict[str, str]] | None, *, action: str = f"{ACTION}call") -> Any:
    ranks = None if sums is None else [{"checksums": dict(found)} for found in sums]

    async def original(*_: object) -> tuple[bool, str, Any, str]:
        return True, "Success.", ranks, "sum"

    return await label(original, front, SimpleNamespace(action=action), None)


async def test_what_all_ranks_have_proved_is_what_the_weights_are_called() -> None:
    front = Front()
    success, message, ranks, total = await asked(front, [{ANSWER: answered(0)}, {ANSWER: answered(1)}])
    assert (success, message, total) == (True, "Success.", "sum")
    assert front.called == ["new"]
    answers = [wire.decode_answer(rank["checksums"][ANSWER]) for rank in ranks]
    assert [(answer.named, answer.number, answer.reply.rank) for answer in answers] == [(True, 7, 0), (True, 7, 1)]


@pytest.mark.parametrize(
    "second",
    [
        {ANSWER: answered(1, failed=True)},
        {ANSWER: answered(1, digest="old")},
        {ANSWER: answered(1, proved=False)},
        {"model.norm.weight": "0123456789abcdef"},
    ],
    ids=["a rank failed", "ranks hold two versions", "not proved", "a rank did not answer"],
)
async def test_what_not_all_have_proved_names_nothing(second: dict[str, str]) -> None:
    front, first = Front(), {ANSWER: answered(0)}
    _, _, ranks, _ = await asked(front, [first, second])
    assert front.called == []
    assert [rank["checksums"] for rank in ranks] == [first, second]


async def test_sglangs_own_checks_and_their_answers_pass() -> None:
    front = Front()
    assert (await asked(front, [{ANSWER: answered(0)}], action="checksum"))[2] == [{"checksums": {ANSWER: answered(0)}}]
    assert (await asked(front, None))[2] is None
    assert front.called == []


async def test_another_release_without_that_name_is_left_to_its_routes() -> None:
    _, _, ranks, _ = await asked(object(), [{ANSWER: answered(0)}])
    assert not wire.decode_answer(ranks[0]["checksums"][ANSWER]).named
