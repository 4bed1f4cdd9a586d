"""The load generator must see every failure and every mixed answer, and nothing that is not one."""

from __future__ import annotations

import pytest

from demo.answers import Answer, mixed_by_digest, mixed_by_text
from demo.load import Load, main
from tests.support.fake_openai import NEW, OLD, Reply, fake_openai

GOOD = Reply()


async def _after(count: int, *replies: Reply, **options: object) -> Load:
    async with fake_openai(*replies) as (url, _):
        async with Load(url, model="fake", streams=1, **options) as load:  # type: ignore[arg-type]
            await load.until(lambda: len(load.answers) >= count)
        return load


async def test_a_whole_answer_is_served_and_says_its_version() -> None:
    load = await _after(2, GOOD)
    summary = load.summary()
    assert (summary.failed, summary.mixed, summary.reconnects) == (0, 0, 0)
    assert summary.clean
    assert summary.by_version == {"1.0": summary.served}
    assert load.answers[0].text == "Hello there"
    assert summary.first_token.worst > 0
    assert "0 failed, 0 mixed" in summary.lines()[0]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=503), "HTTP 503"),
        (Reply(status=409), "HTTP 409"),
        (Reply(error="ended by the server"), "ended by the server"),
        (Reply(cut="early"), "without a finish_reason"),
        (Reply(cut="reset"), "Connection"),
    ],
    ids=["refused", "conflict", "error event", "ends early", "connection reset"],
)
async def test_anything_but_a_whole_answer_has_failed(reply: Reply, reason: str) -> None:
    summary = (await _after(2, reply, GOOD)).summary()
    assert summary.failed == 1
    assert not summary.clean
    assert reason.lower() in next(iter(summary.failures)).lower()
    assert summary.served >= 1


async def test_an_unreachable_server_is_a_failure_not_a_crash() -> None:
    async with fake_openai(GOOD) as (url, _):
        pass
    async with Load(url, model="fake", streams=1) as load:
        await load.until(lambda: len(load.answers) >= 1)
    assert load.summary().served == 0
    assert load.summary().failed == len(load.answers)


@pytest.mark.parametrize(
    "reply",
    [Reply(spans=(OLD, NEW)), Reply(fingerprints=(OLD, NEW)), Reply(spans=(NEW,))],
    ids=["spans", "fingerprints", "span is not the header's"],
)
async def test_an_answer_that_names_two_versions_is_mixed(reply: Reply) -> None:
    summary = (await _after(2, reply, GOOD)).summary()
    assert (summary.failed, summary.mixed) == (0, 1)
    assert not summary.clean


async def test_spans_of_one_version_are_not_mixed() -> None:
    assert (await _after(1, Reply(spans=(OLD, OLD)))).summary().mixed == 0


async def test_two_alphabets_in_one_answer_are_mixed_whatever_it_claims() -> None:
    classify = mixed_by_text("abc", "xyz")
    honest, lying = Reply(pieces=("ab", "ca")), Reply(pieces=("ab", "xy"))
    assert (await _after(2, lying, honest, mixed=classify)).summary().mixed == 1


async def test_reopened_connections_are_counted() -> None:
    replies = (Reply(close=True), Reply(close=True), GOOD)
    async with fake_openai(*replies) as (url, script), Load(url, model="fake", streams=1) as load:
        await load.until(lambda: len(load.answers) >= 5)
    assert load.summary().reconnects == 2
    assert load.summary().failed == 0
    assert len(script.asked) == len(load.answers)


async def test_every_stream_asks_and_no_prompt_is_sent_twice() -> None:
    async with fake_openai(GOOD) as (url, script), Load(url, model="fake", streams=3) as load:
        await load.served_more(6)
    prompts = [str(body["messages"]) for body in script.asked]
    assert len(set(prompts)) == len(prompts) >= 6
    assert load.summary(since=load.answers[3].started).served < load.summary().served


async def test_waiting_for_what_never_comes_ends_with_the_load() -> None:
    async with fake_openai(GOOD) as (url, _):
        async with Load(url, model="fake", streams=1) as load:
            pass
        with pytest.raises(RuntimeError, match="has not come"):
            await load.until(lambda: False)


def test_the_command_refuses_to_run_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--model" in capsys.readouterr().err


def test_the_fingerprint_of_an_engines_build_is_no_version() -> None:
    answer = Answer(prompt="hi", started=0.0)
    answer.saw_digest(f"sha256:{'a' * 64}")
    for fingerprint in ("vllm-0.32.0-tp1-0123abcd", None, f"fp_{'a' * 12}"):
        answer.saw_fingerprint(fingerprint)
    assert not mixed_by_digest(answer)
    answer.saw_fingerprint(f"fp_{'b' * 12}")
    assert mixed_by_digest(answer)
