"""What was asked of the product's speed, beside what this run measured. Pure; a miss is said, and fails nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from bench.delta import DeltaRow
from bench.measure import ModelResult, OnceResult
from bench.modes import GapsRow, ModeRow, ModesResult
from bench.report import Ratios
from modelswap_engine.protocol.policy import TrafficMode

EXCESS_SECONDS: Final = 0.001
KEPT: Final = 0.8
WAY_IN_MICROSECONDS: Final = 10.0
RELOAD_TO_WINDOW: Final = 1000.0
RELOAD_BYTES: Final = 1.9e9
STAGING: Final = 0.7
CHECK: Final = 0.8
DIFF_SECONDS: Final = 1.0
SMALLER: Final = {"1 % replaced": 30.0, "3 % replaced": 12.0}
MADE_ON_TWO_CORES: Final = 1e9


class Verdict(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One line: ``met`` is None where what was asked is no number, or this run cannot tell."""

    what: str
    asked: str
    measured: str
    met: bool | None = None

    def line(self) -> str:
        """Return it for a person."""
        mark = {True: "met", False: "NOT MET", None: "see"}[self.met]
        return f"{mark:<8}{self.what}: asked {self.asked}; measured {self.measured}"


def verdicts(once: OnceResult, results: Sequence[ModelResult], found: Ratios) -> Iterator[Verdict]:
    """Say everything that this run can tell."""
    if once.modes is not None:
        yield from _modes(once.modes)
    if (decode := once.decode) is not None:
        yield Verdict(
            what="decode speed while staging",
            asked=f">= {100 * KEPT:.0f} %",
            measured=f"{100 * decode.kept:.0f} % ({decode.alone:.1f} tokens/s alone, {decode.while_staging:.1f} beside "
            f"{decode.staged_bytes_per_second / 1e6:.0f} MB/s)",
            met=decode.kept >= KEPT,
        )
    if (gate := once.gate) is not None:
        yield Verdict(
            what="gate, lock and adapter registry",
            asked=f"< {WAY_IN_MICROSECONDS:.0f} µs per request",
            measured=f"{gate.total_microseconds:.1f} µs of processor time "
            f"({gate.admission_microseconds:.1f} gate and lock, {gate.registry_microseconds:.1f} registry)",
            met=gate.total_microseconds < WAY_IN_MICROSECONDS,
        )
    if (diff := once.diff) is not None:
        yield Verdict(
            what="modelswap diff of two checkpoints with manifests",
            asked=f"< {DIFF_SECONDS:.0f} s at 4 GB",
            measured=f"{diff.seconds:.2f} s at {diff.nbytes / 1e9:.1f} GB ({diff.tensors} tensors, start-up included)",
            met=diff.seconds < DIFF_SECONDS,
        )
    for row in once.delta:
        yield from _delta(row)
    yield from _windows(results, found)
    if found.staging_to_bound is not None:
        yield _share(
            "staging what is in memory, of the lower of SHA-256 on all cores and reading",
            found.staging_to_bound,
            STAGING,
        )
    if found.volume_to_bound is not None:
        yield _share("staging what is on the volume only, of the same", found.volume_to_bound, STAGING)
    if found.check_to_sha256 is not None:
        yield _share("hashing live tensors, of SHA-256 on all cores", found.check_to_sha256, CHECK)


def _delta(row: DeltaRow) -> Iterator[Verdict]:
    elements = f"{row.change}, {100 * row.share:.0f} % of elements changed"
    asked = SMALLER.get(row.change)
    yield Verdict(
        what=f"delta pack, {elements}: its bytes by those of the tensors",
        asked=f"<= 1/{asked:.0f}" if asked else "no number",
        measured=f"1/{row.ratio:.1f}",
        met=row.ratio >= asked if asked else None,
    )
    yield Verdict(
        what=f"making tensors from it before hashing, {elements}",
        asked=f">= {MADE_ON_TWO_CORES / 1e9:.0f} GB/s on two cores",
        measured=f"{row.on_two_cores / 1e9:.1f} GB/s ({100 * row.make / row.copy:.0f} % of copying; "
        f"hashed {100 * row.prove / row.sha256:.0f} % of SHA-256)",
        met=row.on_two_cores >= MADE_ON_TWO_CORES,
    )


def _share(what: str, measured: float, asked: float) -> Verdict:
    return Verdict(
        what=what, asked=f">= {100 * asked:.0f} %", measured=f"{100 * measured:.0f} %", met=measured >= asked
    )


def _modes(found: ModesResult) -> Iterator[Verdict]:
    rows = {row.mode: row for row in found.modes}
    if (freeze := rows.get(TrafficMode.FREEZE)) is not None:
        yield Verdict(
            what="Freeze: token gap beyond one step and the stop latency",
            asked=f"<= {_ms(EXCESS_SECONDS)}",
            measured=_excess(freeze),
            met=freeze.excess <= EXCESS_SECONDS,
        )
    if (recompute := rows.get(TrafficMode.RECOMPUTE)) is not None:
        yield Verdict(
            what="Recompute: the same, beyond computing the prompts again",
            asked=f"<= {_ms(EXCESS_SECONDS)} + {_ms(recompute.prefill)} of prompts",
            measured=_excess(recompute),
            met=recompute.excess <= EXCESS_SECONDS + recompute.prefill,
        )
    if (overlap := rows.get(TrafficMode.OVERLAP)) is not None:
        yield Verdict(
            what="Overlap: requests that waited",
            asked="none",
            measured=f"{overlap.waited} in {overlap.swaps} swaps",
            met=overlap.waited == 0,
        )
    if found.overlapping is not None and found.split is not None:
        yield _overlapping(found.overlapping, found.split)


def _excess(row: ModeRow) -> str:
    return (
        f"{_ms(row.excess)}, at most {_ms(row.excess_longest)} in {row.swaps} swaps "
        f"(gap {_ms(row.gap)}, step {_ms(row.step)}, stop latency {_ms(row.stop_latency)})"
    )


def _overlapping(during: GapsRow, split: GapsRow) -> Verdict:
    return Verdict(
        what="Overlap: token gaps during the swap, by those of the load split over two engines",
        asked="no gap of its own",
        measured=f"median {during.median / split.median:.2f} ×, 95 of 100 within {during.late / split.late:.2f} ×, "
        f"longest {_ms(during.longest)} against {_ms(split.longest)}",
    )


def _windows(results: Sequence[ModelResult], found: Ratios) -> Iterator[Verdict]:
    if found.reload_to_window is not None:
        nbytes = max(result.nbytes for result in results)
        enough = nbytes >= RELOAD_BYTES
        yield Verdict(
            what="full reload in place, by the commit window",
            asked=f">= {RELOAD_TO_WINDOW:.0f} × at 2 GB",
            measured=f"{found.reload_to_window:.0f} × at {nbytes / 1e9:.2f} GB",
            met=found.reload_to_window >= RELOAD_TO_WINDOW if enough else None,
        )
    if found.commit_window_per_gigabyte is not None and found.commit_window_intercept is not None:
        yield Verdict(
            what="commit window against model size",
            asked="slope about 0",
            measured=f"{found.commit_window_intercept:.0f} µs {found.commit_window_per_gigabyte:+.1f} µs for each GB",
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
