"""What a client saw: one record per request, and what many of them come to. Pure; knows no HTTP.

A request is *served* when its answer came to its end, *failed* when anything else happened, and a served answer is
*mixed* when it says, or shows, that more than one version had a part in it.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_OF_A_VERSION: Final = re.compile("fp_[0-9a-f]{12}")
Classifier = Callable[["Answer"], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """So many tokens of an answer, and the version that made them, as the answer says."""

    version: str
    tokens: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request and what came of it; times are seconds of a monotonic clock.

    Attributes:
        version: label in the response's headers.
        digests: every digest the answer named: header, fingerprint of each chunk, spans.
        spans: what the last chunk of an answer of several versions says.
        tokens_at: when each piece of text arrived.
        failure: why it was not served; empty when it was.
        error: the server's own words about that, when it had any.
    """

    prompt: str
    started: float
    text: str = ""
    version: str = ""
    digests: set[str] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)
    tokens_at: list[float] = field(default_factory=list)
    finish: str = ""
    ended: float = 0.0
    failure: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    mixed: bool = False

    @property
    def served(self) -> bool:
        """True when the answer came to its end."""
        return not self.failure

    def saw_digest(self, digest: str | None) -> None:
        """Remember a digest, ``sha256:<64 hex>``, or a fingerprint, ``fp_<12 hex>`` of one."""
        if digest:
            self.digests.add(digest.removeprefix("sha256:").removeprefix("fp_")[:12])

    def saw_fingerprint(self, fingerprint: str | None) -> None:
        """Remember a chunk's fingerprint where it is a version's; behind a proxy it is that of the engine's build."""
        if fingerprint and _OF_A_VERSION.fullmatch(fingerprint):
            self.saw_digest(fingerprint)

    def saw_spans(self, extension: Any) -> None:
        """Remember the versions that the last chunk lists."""
        spans = extension.get("spans", ()) if isinstance(extension, dict) else ()
        for span in spans:
            self.saw_digest(span.get("digest"))
            self.spans.append(Span(version=str(span.get("version", "")), tokens=int(span.get("tokens", 0))))


def mixed_by_digest(answer: Answer) -> bool:
    """Say whether the answer named more than one version."""
    return len(answer.digests) > 1


def mixed_by_text(*alphabets: Iterable[str]) -> Classifier:
    """Return a classifier for models that can only write letters of their own alphabet, whatever the answer claims."""
    sets = [frozenset(alphabet) for alphabet in alphabets]

    def classify(answer: Answer) -> bool:
        used = sum(1 for letters in sets if letters & set(answer.text))
        return used > 1 or mixed_by_digest(answer)

    return classify


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A few numbers for many, in milliseconds."""

    median: float = 0.0
    p99: float = 0.0
    worst: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the spread of some durations."""
        if not seconds:
            return cls()
        ordered = sorted(seconds)
        p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
        return cls(median=1000 * statistics.median(ordered), p99=1000 * p99, worst=1000 * ordered[-1])

    def __str__(self) -> str:
        """Name the numbers."""
        return f"median {self.median:.0f} ms, p99 {self.p99:.0f} ms, longest {self.worst:.0f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a load comes to. ``by_version`` counts served answers, ``failures`` reasons."""

    served: int
    failed: int
    mixed: int
    reconnects: int
    by_version: dict[str, int]
    failures: dict[str, int]
    first_token: Spread
    token_gap: Spread

    @property
    def clean(self) -> bool:
        """True when requests were served, none failed and none was mixed."""
        return self.served > 0 and self.failed == 0 and self.mixed == 0

    def lines(self) -> list[str]:
        """Return the summary for a person."""
        versions = ", ".join(f"{count} by {version or '?'}" for version, count in sorted(self.by_version.items()))
        counts = f"{self.served} served ({versions or 'none'}), {self.failed} failed, {self.mixed} mixed"
        lines = [
            f"requests: {counts}, {self.reconnects} reconnects",
            f"time to first token: {self.first_token}",
            f"gap between tokens:  {self.token_gap}",
        ]
        return lines + [f"failed {count} times: {reason}" for reason, count in self.failures.items()]


def summarize(answers: Sequence[Answer], *, reconnects: int) -> Summary:
    """Count ended answers."""
    served = [answer for answer in answers if answer.served]
    first = [answer.tokens_at[0] - answer.started for answer in served if answer.tokens_at]
    gaps = [
        later - earlier
        for answer in served
        for earlier, later in zip(answer.tokens_at, answer.tokens_at[1:], strict=False)
    ]
    return Summary(
        served=len(served),
        failed=len(answers) - len(served),
        mixed=sum(answer.mixed for answer in served),
        reconnects=reconnects,
        by_version=dict(Counter(answer.version for answer in served)),
        failures=dict(Counter(answer.failure for answer in answers if not answer.served)),
        first_token=Spread.of(first),
        token_gap=Spread.of(gaps),
    )
