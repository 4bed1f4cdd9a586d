"""Conditions, Events and the honest no, as values."""

from datetime import UTC, datetime, timedelta

import pytest

from modelswap_operator.api.conditions import Condition
from modelswap_operator.api.modelversion import Failure, ModelVersionStatus
from modelswap_operator.api.reasons import ConditionType
from modelswap_operator.status.conditions import MESSAGE_LIMIT, Verdict, conditions, standing
from modelswap_operator.status.events import of_status

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
LATER = NOW + timedelta(minutes=5)


def ready(status: bool | None, reason: str = "Because", message: str = "m") -> Verdict:
    return Verdict(ConditionType.READY, status, reason, message)


def test_the_transition_time_moves_with_the_status_only() -> None:
    first = conditions([ready(True)], observed=(), generation=1, now=NOW)
    same = conditions([ready(True, "Other", "n")], observed=first, generation=2, now=LATER)
    moved = conditions([ready(None)], observed=first, generation=2, now=LATER)
    assert [c[0].last_transition_time for c in (first, same, moved)] == [
        "2026-11-29T12:00:00Z",
        "2026-11-29T12:00:00Z",
        "2026-11-29T12:05:00Z",
    ]
    assert (same[0].reason, same[0].observed_generation) == ("Other", 2)
    assert moved[0].status == "Unknown"


def test_negative_conditions_exist_only_while_true() -> None:
    verdicts = [Verdict(kind, False, "R", "m") for kind in ConditionType]
    kept = {c.type for c in conditions(verdicts, observed=(), generation=1, now=NOW)}
    assert kept == {"Ready", "Serving", "WeightsVerified"}


def test_a_message_fits_its_field() -> None:
    found = conditions([ready(False, message="x" * 10000)], observed=(), generation=1, now=NOW)
    assert len(found[0].message) == MESSAGE_LIMIT


def status(verdict: Verdict, **fields: object) -> ModelVersionStatus:
    found = conditions([verdict], observed=(), generation=1, now=NOW)
    return ModelVersionStatus(conditions=found, **fields)  # type: ignore[arg-type]


def test_events_tell_changes_once() -> None:
    moving, done = status(ready(None, "Progressing")), status(ready(True, "Succeeded", "2/2 pods serve 1.1"))
    assert of_status(ModelVersionStatus(), moving) == ()
    assert [(n.reason, n.warning, n.text) for n in of_status(moving, done)] == [
        ("Succeeded", False, "2/2 pods serve 1.1")
    ]
    assert of_status(done, done) == ()


def test_a_failure_is_told_once_with_its_own_words() -> None:
    failure = Failure(generation=2, digest="", reason="DigestMismatch", message="other content")
    failed = status(ready(False, "DigestMismatch"), failures=(failure,))
    notes = of_status(status(ready(None)), failed)
    assert [(n.reason, n.warning, n.text) for n in notes] == [("DigestMismatch", True, "other content")]
    assert of_status(failed, failed) == ()


@pytest.mark.parametrize(
    ("true", "word"),
    [
        ((), "Unknown"),
        (("Reconciling",), "Reconciling"),
        (("Ready", "Serving"), "Ready"),
        (("Stalled", "Serving", "WeightsVerified"), "Stalled"),
        (("Suspended", "Reconciling"), "Suspended"),
    ],
)
def test_an_object_is_one_thing_for_the_metrics(true: tuple[str, ...], word: str) -> None:
    assert standing(Condition(type=kind, status="True", reason="R", message="") for kind in true) == word
