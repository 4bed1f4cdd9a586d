"""What the process is told, and when it calls itself alive and ready."""

import pytest

from modelswap_operator.api.reasons import TEXTS, Reason
from modelswap_operator.planning.backoff import LONGEST_SECONDS, delay
from modelswap_operator.runtime.health import Pulse, alive, ready
from modelswap_operator.runtime.settings import parse

ENVIRONMENT = {"POD_NAMESPACE": "modelswap", "POD_NAME": "operator-0", "SERVICE_ACCOUNT": "operator"}


def test_flags_of_the_chart() -> None:
    found = parse(
        ["--namespace", "a", "--namespace", "b", "--namespace", "a", "--leader-elect", "--lease-name=x"], ENVIRONMENT
    )
    assert found.namespaces == ("a", "b")
    assert (found.leader_elect, found.lease_name, found.http_port) == (True, "x", 8080)
    assert (found.pod_namespace, found.service_account) == ("modelswap", "operator")
    assert parse(["--all-namespaces"], ENVIRONMENT).namespaces == ()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--all-namespaces", "--namespace", "a"],
        ["--all-namespaces", "--lease-seconds", "10", "--renew-seconds", "10"],
        ["--all-namespaces", "--retry-seconds", "0.5"],
        ["--all-namespaces", "--log-format", "xml"],
    ],
)
def test_contradictions_end_with_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments, ENVIRONMENT)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pulse", "live", "serving"),
    [
        (Pulse(leading=False), 200, 200),
        (Pulse(leading=True, listed=False), 200, 503),
        (Pulse(leading=True, listed=True), 200, 200),
        (Pulse(leading=True, listed=True, beat_age=31), 503, 200),
        (Pulse(leading=True, listed=True, oldest_pass=181), 503, 200),
    ],
)
def test_liveness_is_progress_and_readiness_the_first_list(pulse: Pulse, live: int, serving: int) -> None:
    assert (alive(pulse)[0], ready(pulse)[0]) == (live, serving)


def test_delays_grow_with_full_jitter_and_are_bounded() -> None:
    longest = [delay(n, 0.999999).total_seconds() for n in range(1, 12)]
    assert longest == sorted(longest)
    assert longest[0] <= 1.0
    assert longest[-1] <= LONGEST_SECONDS
    assert delay(7, 0.0).total_seconds() == LONGEST_SECONDS / 10
    assert delay(100000, 0.5).total_seconds() <= LONGEST_SECONDS


def test_every_reason_has_a_text() -> None:
    assert set(TEXTS) == set(Reason)
