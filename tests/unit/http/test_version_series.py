"""Series by version: the last versions have theirs, and a thousand swaps are not a thousand series."""

from modelswap_engine.http.answers import OK
from modelswap_engine.http.metrics import Metrics
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import VersionRef


def test_the_oldest_versions_lose_all_their_series_and_the_last_ones_none() -> None:
    metrics = Metrics(EngineState)
    versions = [f"1.{number}" for number in range(40)]
    for version in versions:
        metrics.let_in(version, 0.1)
        if version != "1.30":  # nobody waited for its answer
            metrics.first_token(version, 0.2)
        metrics.count_request(VersionRef(version=version, digest=f"sha256:{version}"), OK)
    shown: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if "version" in sample.labels and not sample.name.endswith(("_created", "_bucket")):
                shown.setdefault(sample.name, set()).add(sample.labels["version"])
    last = set(versions[-16:])
    assert shown["modelswap_requests_total"] == shown["modelswap_gate_wait_seconds_count"] == last
    assert shown["modelswap_time_to_first_token_seconds_count"] == last - {"1.30"}
