"""What the demo writes and shows must be what it measured."""

from __future__ import annotations

import pytest

from demo.answers import Answer, summarize
from demo.excerpts import WIDTH, refusal_excerpt, without_age
from demo.report import Facts, as_dict, swap_lines
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import Plan, SwapStatus
from tests.support.pod import Pod


def answers(*, served: int, failed: int = 0) -> list[Answer]:
    good = [Answer(prompt="", started=1.0, version="1.0", tokens_at=[1.1, 1.2]) for _ in range(served)]
    return good + [Answer(prompt="", started=1.0, failure="HTTP 503") for _ in range(failed)]


def facts() -> Facts:
    plan = Plan(changed_tensors=9, changed_bytes=7_000_000, total_tensors=272, total_bytes=269_000_000)
    swap = SwapStatus(
        operation_id="op",
        plan=plan,
        bytes_fetched=7_000_000,
        pause_seconds=0.02,
        stop_latency_seconds=0.019,
        commit_window_microseconds=130.0,
    )
    pod = Pod(name="pod-a", uid="uid-a", restarts=0, ready=True, started="2026-01-01T00:00:00Z")
    return Facts(
        before="Paris.",
        after="Ahoy! Paris.",
        pods=[(pod, EngineState(operation=swap))],
        swap_seconds=4.0,
        swapping=summarize(answers(served=8), reconnects=3),
        restart_seconds=60.0,
        restarting=summarize(answers(served=2, failed=1), reconnects=0),
        refused=[{"version": "bad", "reason": "ManifestMismatch", "message": "tensor x"}],
    )


def test_the_file_has_the_fields_that_its_readers_were_promised() -> None:
    document = as_dict(facts(), kind="kind", version="v1.36.3")
    assert document["requests"] == {"served": 8, "failed": 0, "mixed": 0, "reconnects": 3}
    assert document["pods"] == [
        {
            "name": "pod-a",
            "uid": "uid-a",
            "restarts": 0,
            "pauseSeconds": 0.02,
            "stopLatencySeconds": 0.019,
            "commitWindowMicroseconds": 130.0,
            "bytesFetched": 7_000_000,
            "bytesFromPeers": 0,
        }
    ]
    assert document["changed"] == {"tensors": 9, "bytes": 7_000_000}
    assert document["total"] == {"tensors": 272, "bytes": 269_000_000}
    assert document["swapSeconds"] == 4.0
    assert document["rolloutRestart"] == {"seconds": 60.0, "served": 2, "failed": 1}
    assert document["refused"][0]["reason"] == "ManifestMismatch"
    assert document["cluster"] == {"kind": "kind", "version": "v1.36.3"}


def test_the_restart_does_not_count_as_the_swap() -> None:
    found = facts()
    assert found.swapping is not None
    assert found.swapping.failed == 0
    assert as_dict(found, kind="", version="")["requests"]["failed"] == 0


def test_every_figure_of_a_pod_has_its_unit() -> None:
    text = "\n".join(swap_lines(facts()))
    for part in ("9 of 272 tensors", "7.0 MB of 269.0 MB", "19.0 ms", "130 µs", "20.0 ms", "0 restarts", "4.0 s"):
        assert part in text


def test_what_was_published_took_its_time_too() -> None:
    found = facts()
    assert not any("publishing" in line for line in swap_lines(found))
    found.publish_seconds = 1.5
    assert "from a trained checkpoint to Ready: 5.5 s, of which publishing took 1.5 s" in list(swap_lines(found))


DESCRIPTION = """\
Status:
  Conditions:
    Last Transition Time:  2026-11-29T17:38:25Z
    Message:               all is lost
    Reason:                Other
    Status:                False
    Type:                  Ready
    Last Transition Time:  2026-11-29T17:28:06Z
    Message:               1.2 refused by pod a: CAUSE
    Observed Generation:   4
    Reason:                ManifestMismatch
    Status:                True
    Type:                  Stalled
  Failures:
    Message:  1.2 refused
Events:
  Type     Reason            Age  From      Message
  Normal   Succeeded         6m   operator  2/2 pods serve 1.1
  Warning  ManifestMismatch  1s   operator  1.2 refused by pod a
  Warning  Other             9s   operator  an older one refused
""".replace(
    "CAUSE", "tensor model.layers.29.self_attn.v_proj.weight: bytes hash to one thing, the manifest says another"
)


def test_the_excerpt_says_why_and_nothing_else() -> None:
    lines = list(refusal_excerpt(DESCRIPTION, version="1.2"))
    text = "\n".join(lines)
    for part in ("ManifestMismatch", "Stalled", "Warning", "1.2 refused by pod a"):
        assert part in text
    for part in ("all is lost", "Succeeded", "an older one", "Last Transition Time", "Observed Generation"):
        assert part not in text


def test_long_lines_are_folded_under_their_text() -> None:
    lines = list(refusal_excerpt(DESCRIPTION, version="1.2"))
    assert max(map(len, lines)) <= WIDTH
    first = next(index for index, line in enumerate(lines) if "Message:" in line)
    assert lines[first].index("1.2 refused") == len(lines[first + 1]) - len(lines[first + 1].lstrip())
    assert "tensor model.layers.29.self_attn.v_proj.weight:" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("description", ["", "Status:\nEvents:  <none>", "\nEvents:\n  Warning  1.2"])
def test_what_describe_does_not_say_is_not_made_up(description: str) -> None:
    assert list(refusal_excerpt(description, version="1.2")) == ["…", "Conditions:", "…", "Events:"]


def test_a_line_without_its_age_does_not_change_by_itself() -> None:
    assert without_age("a  1.1  True  2/2 pods serve 1.1   5s") == without_age("a  1.1  True  2/2 pods serve 1.1   6s")
    assert without_age("a  1.1  True  all   5s") != without_age("a  1.1  False  all   5s")
    assert without_age("") == ""
